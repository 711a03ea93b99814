//! The verdict on a promised share of what the disk allows.

use crate::disk::DiskLimit;

use super::{DiskShare, Rounds, Verdict, costs_text, median};

/// The verdict on the share of what the disk allows, by the median of the rounds. The disk is measured in each.
pub(super) fn judge(disk: &DiskShare, rounds: &Rounds) -> Verdict {
    let verdict = Verdict {
        name: disk.name.clone(),
        value: None,
        range: None,
        unit: "x",
        is_limit: false,
        threshold: disk.threshold,
        target: None,
        note: String::new(),
    };
    let shares: Result<Vec<f64>, String> =
        rounds
            .iter()
            .map(|outcome| {
                let outcome = outcome.as_ref().map_err(Clone::clone)?;
                match (&outcome.disk, outcome.disk_allows_ops_per_s()) {
                    (_, Some(allowed)) => Ok(outcome.measured.ops_per_s() / allowed),
                    (Some(DiskLimit::NotMeasured(reason)), _) => Err(format!("not measured: {reason}")),
                    _ => Err("not measured: the server counts no misses, or its counters were read late"
                        .to_owned()),
                }
            })
            .collect();
    let last = rounds.iter().rev().find_map(|outcome| outcome.as_ref().ok());
    match (shares, last) {
        (Ok(shares), Some(last)) if !shares.is_empty() => {
            let iops = match last.disk {
                Some(DiskLimit::Iops(iops)) => format!("disk {iops:.0} IOPS"),
                _ => String::new(),
            };
            let (least, most) = (
                shares.iter().copied().fold(f64::INFINITY, f64::min),
                shares.iter().copied().fold(0.0, f64::max),
            );
            Verdict {
                value: Some(median(&shares)),
                range: Some((least, most)),
                note: format!("{:.0} ops/s, {iops}{}", last.measured.ops_per_s(), costs_text(rounds)),
                ..verdict
            }
        }
        (Err(error), _) => Verdict { note: error, ..verdict },
        _ => Verdict { note: "no round was measured".to_owned(), ..verdict },
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{PLAN, outcome, parse};
    use super::*;
    use crate::runner::Outcome;

    #[test]
    fn a_share_of_the_disk_is_of_its_reads_for_each_miss() {
        let disk = DiskShare { name: "uniform".into(), point: "term".into(), threshold: 0.9 };
        let round = |ops, limit| {
            let outcome = outcome(ops, Vec::new()).unwrap();
            Ok(Outcome { hit_ratio: Some(0.5), disk: Some(limit), ..outcome })
        };
        let verdict = judge(&disk, &vec![round(95_000, DiskLimit::Iops(50_000.0))]);
        assert_eq!((verdict.value, verdict.label()), (Some(0.95), "ok"));
        assert_eq!(verdict.note, "95000 ops/s, disk 50000 IOPS; 50.0 % hits, 5.0 + 4.0 core-us");
        let verdict = judge(&disk, &vec![round(1, DiskLimit::NotMeasured("fio is not installed".into()))]);
        assert_eq!((verdict.label(), &*verdict.note), ("MISSED", "not measured: fio is not installed"));
        let bound =
            PLAN.replace("theta = 0.5, switch-at-percent = 50", "theta = 0.0, switch-at-percent = 50");
        let disk = "\n[[disk]]\nname = \"d\"\npoint = \"term\"\nthreshold = 0.9\n";
        assert!(parse(&(bound + disk)).is_ok());
        assert!(parse(&(PLAN.to_owned() + disk)).unwrap_err().contains("the disk does not limit 'term'"));
    }
}
