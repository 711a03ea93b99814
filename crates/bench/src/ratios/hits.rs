//! The verdict on a promised hit ratio.

use crate::keys::Distribution;
use crate::plan::Settings;

use super::{Hits, Rounds, Verdict, costs_text, median};

const PAGE_BYTES: u64 = 4096;

/// The best possible hit ratio of accesses to one page each: the hottest pages are in memory. The error states why these
/// accesses have none that is known.
pub(super) fn optimum(settings: &Settings) -> Result<f64, String> {
    if settings.distribution != Distribution::Zipf || settings.size != PAGE_BYTES {
        return Err("the optimum is known for Zipf accesses of 4K only".to_owned());
    }
    let weight = |count: u64| (1..=count).map(|rank| (rank as f64).powf(-settings.theta)).sum::<f64>();
    Ok(weight(settings.dram_bytes() / PAGE_BYTES) / weight(settings.region / PAGE_BYTES))
}

/// The verdict on the distance of the hit ratio from the best possible one, by the median of the rounds.
pub(super) fn judge(hits: &Hits, settings: &Settings, rounds: &Rounds) -> Verdict {
    let verdict = Verdict {
        name: hits.name.clone(),
        value: None,
        range: None,
        unit: "points",
        is_limit: true,
        threshold: hits.points_below_optimum_max,
        target: None,
        note: String::new(),
    };
    let judged = optimum(settings).and_then(|best| {
        let ratio = |outcome: &Result<crate::runner::Outcome, String>| {
            let outcome = outcome.as_ref().map_err(Clone::clone)?;
            outcome
                .hit_ratio
                .ok_or_else(|| "the server counts no misses, or its counters were read late".to_owned())
        };
        let below: Vec<f64> =
            rounds.iter().map(|one| Ok((best - ratio(one)?) * 100.0)).collect::<Result<_, String>>()?;
        if below.is_empty() { Err("no round was measured".to_owned()) } else { Ok((best, below)) }
    });
    match judged {
        Err(error) => Verdict { note: error, ..verdict },
        Ok((best, below)) => {
            let (least, most) =
                below.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), one| {
                    (least.min(*one), most.max(*one))
                });
            Verdict {
                value: Some(median(&below)),
                range: Some((least, most)),
                note: format!("the best possible is {:.1} %{}", best * 100.0, costs_text(rounds)),
                ..verdict
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{PLAN, outcome, parse};
    use super::*;
    use crate::runner::Outcome;

    #[test]
    fn a_hit_ratio_is_compared_with_the_best_possible_one() {
        let settings = |dram_percent| Settings { dram_percent, ..Settings::default() };
        for (dram_percent, best) in [(50, 0.946), (20, 0.876), (100, 1.0)] {
            assert!((optimum(&settings(dram_percent)).unwrap() - best).abs() < 0.001, "{dram_percent} %");
        }
        let hits = Hits { name: "hits".into(), point: "term".into(), points_below_optimum_max: 2.0 };
        let round = |hit_ratio| Ok(Outcome { hit_ratio, ..outcome(1000, Vec::new()).unwrap() });
        let verdict =
            judge(&hits, &settings(50), &vec![round(Some(0.93)), round(Some(0.9)), round(Some(0.932))]);
        assert_eq!(verdict.label(), "ok", "{verdict:?}");
        assert!((verdict.value.unwrap() - 1.6).abs() < 0.05, "{verdict:?}");
        assert_eq!(judge(&hits, &settings(50), &vec![round(Some(0.92))]).label(), "MISSED");
        assert_eq!(
            judge(&hits, &settings(50), &vec![round(None)]).note,
            "the server counts no misses, or its counters were read late"
        );
    }

    #[test]
    fn only_points_with_a_known_optimum_are_judged() {
        let hits = "\n[[hits]]\nname = \"h\"\npoint = \"term\"\npoints-below-optimum-max = 2.0\n";
        assert!(parse(&(PLAN.to_owned() + hits)).is_ok());
        let small = PLAN.replace("theta = 0.5,", "theta = 0.5, size = \"256\",") + hits;
        assert!(parse(&small).unwrap_err().contains("the optimum is known"));
    }
}
