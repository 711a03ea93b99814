//! The client's model of the table: a piecewise linear function from a key to the leaf that has it.
//!
//! Such a model is a learned index. Segments are as long as one line keeps the error bound (the "shrinking cone" of
//! FITing-Tree, SIGMOD'19).

/// The most by which a segment's line differs from the number of a leaf at the leaf's first key. With less than 1 a
/// prediction is at most one leaf off.
const LINE_ERROR_LEAVES: f64 = 0.25;

/// A line over consecutive leaves.
#[derive(Clone, Copy, Debug)]
struct Segment {
    first_key: u64,
    first_leaf: u64,
    last_leaf: u64,
    leaves_per_key: f64,
}

/// A model of a table.
#[derive(Debug)]
pub struct Model {
    segments: Vec<Segment>,
}

impl Model {
    /// The model for the first keys of all leaves, which ascend.
    pub fn train(first_keys: impl Iterator<Item = u64>) -> Model {
        let mut segments: Vec<Segment> = Vec::new();
        // The slopes of all lines that keep the bound, for the last segment.
        let (mut least, mut most) = (0.0, f64::INFINITY);
        for (key, leaf) in first_keys.zip(0..) {
            if let Some(segment) = segments.last_mut() {
                let keys = (key - segment.first_key) as f64;
                let leaves = (leaf - segment.first_leaf) as f64;
                let low = f64::max(least, (leaves - LINE_ERROR_LEAVES) / keys);
                let high = f64::min(most, (leaves + LINE_ERROR_LEAVES) / keys);
                if low <= high {
                    (least, most) = (low, high);
                    segment.last_leaf = leaf;
                    segment.leaves_per_key = f64::midpoint(low, high);
                    continue;
                }
            }
            segments.push(Segment { first_key: key, first_leaf: leaf, last_leaf: leaf, leaves_per_key: 0.0 });
            (least, most) = (0.0, f64::INFINITY);
        }
        Model { segments }
    }

    /// The number of segments.
    pub fn segment_count(&self) -> usize {
        self.segments.len()
    }

    /// The predicted leaf of a key: the right one or one beside it, if the table has the key.
    pub fn predict(&self, key: u64) -> u64 {
        let next = self.segments.partition_point(|segment| segment.first_key <= key);
        let Some(segment) = self.segments.get(next.saturating_sub(1)) else { return 0 };
        let leaves = key.saturating_sub(segment.first_key) as f64 * segment.leaves_per_key;
        (segment.first_leaf + leaves as u64).min(segment.last_leaf)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_prediction_is_at_most_one_leaf_off(
            gaps in prop::collection::vec(prop_oneof![1_u64..4, 1_u64..1000, 1_u64..1 << 40], 1..600),
            leaf_keys in 1_usize..20,
        ) {
            let keys: Vec<u64> =
                gaps.iter().scan(0_u64, |key, gap| { *key += gap; Some(*key) }).collect();
            let model = Model::train(keys.iter().copied().step_by(leaf_keys));
            for (index, &key) in keys.iter().enumerate() {
                let (leaf, predicted) = ((index / leaf_keys) as u64, model.predict(key));
                prop_assert!(leaf.abs_diff(predicted) <= 1, "key {key}: leaf {leaf}, predicted {predicted}");
            }
            prop_assert!(model.predict(0) == 0 && model.predict(u64::MAX) < keys.len() as u64);
        }
    }

    #[test]
    fn equal_gaps_need_one_segment() {
        let model = Model::train((0..1_000_000).map(|leaf| leaf * 12_345));
        assert_eq!(model.segment_count(), 1);
        assert!((0..1_000_000).all(|leaf| model.predict(leaf * 12_345).abs_diff(leaf) <= 1));
        assert_eq!(Model::train(std::iter::empty()).predict(7), 0);
    }
}
