//! Promised ratios between modes, which are measured alternately in one run, hit ratios, and limits for a switch of
//! the hotspot.

mod disk;
mod hits;
mod plan;

use serde::Serialize;

use crate::runner::Outcome;
use crate::workload::STEP;

pub use plan::{DiskShare, Hits, NamedPoint, Ratio, RatioPlan, Switch};

/// The verdict on one promise.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// The name of the promise.
    pub name: String,
    /// The measured value; `None` if a point failed.
    pub value: Option<f64>,
    /// The minimum and the maximum of the rounds, for ratios.
    pub range: Option<(f64, f64)>,
    /// The unit of the value: `x`, `points`, `%` or `s`.
    pub unit: &'static str,
    /// Whether smaller is better.
    pub is_limit: bool,
    /// The threshold that must be counts.
    pub threshold: f64,
    /// The target that should be counts.
    pub target: Option<f64>,
    /// The two throughputs, or the reason for a missing value.
    pub note: String,
}

impl Verdict {
    fn satisfies(&self, limit: f64) -> bool {
        self.value.is_some_and(|value| if self.is_limit { value <= limit } else { value >= limit })
    }

    /// Whether the threshold is counts.
    pub fn is_threshold_met(&self) -> bool {
        self.satisfies(self.threshold)
    }

    /// `ok`, `ok, target missed` or `MISSED`.
    pub fn label(&self) -> &'static str {
        match (self.is_threshold_met(), self.target.is_none_or(|target| self.satisfies(target))) {
            (false, _) => "MISSED",
            (true, false) => "ok, target MISSED",
            (true, true) => "ok",
        }
    }

    /// A line of a table: name, value, range, threshold, target, verdict, note.
    pub fn cells(&self) -> Vec<String> {
        let sign = if self.is_limit { "<=" } else { ">=" };
        let show = |value: f64| format!("{value:.2} {}", self.unit);
        vec![
            self.name.clone(),
            self.value.map_or("-".to_owned(), show),
            self.range.map_or(String::new(), |(least, most)| format!("{least:.2} to {most:.2}")),
            format!("{sign} {}", show(self.threshold)),
            self.target.map_or(String::new(), |target| format!("{sign} {}", show(target))),
            self.label().to_owned(),
            self.note.clone(),
        ]
    }
}

/// The titles of [`Verdict::cells`].
pub const HEADER: [&str; 7] = ["ratio", "measured", "rounds", "threshold", "target", "", "from"];

/// The results of one point's rounds, in order.
pub type Rounds = Vec<Result<Outcome, String>>;

/// Judges the promises. `rounds` is in the order of the plan's points.
pub fn judge(plan: &RatioPlan, rounds: &[Rounds]) -> Vec<Verdict> {
    let of = |name: &str| -> &Rounds {
        let index = plan
            .points
            .iter()
            .position(|point| point.name == name)
            .expect("the plan's check admits only names of points");
        &rounds[index]
    };
    let ratios = plan.ratios.iter().map(|ratio| judge_ratio(ratio, of(&ratio.of), of(&ratio.to)));
    let switches = plan.switches.iter().flat_map(|switch| {
        let point = plan.points.iter().find(|point| point.name == switch.point);
        let percent = point
            .and_then(|point| plan.point(point).ok())
            .and_then(|point| point.settings.switch_at_percent)
            .unwrap_or(50);
        judge_switch(switch, of(&switch.point), percent)
    });
    let disks = plan.disks.iter().map(|disk| disk::judge(disk, of(&disk.point)));
    let hits = plan.hits.iter().map(|hits| {
        let point = plan.points.iter().find(|point| point.name == hits.point);
        let point = point.and_then(|point| plan.point(point).ok());
        hits::judge(
            hits,
            &point.expect("the plan's check admits only valid points").settings,
            of(&hits.point),
        )
    });
    ratios.chain(disks).chain(hits).chain(switches).collect()
}

fn throughputs(rounds: &Rounds) -> Result<Vec<f64>, String> {
    rounds
        .iter()
        .map(|outcome| outcome.as_ref().map(|it| it.measured.ops_per_s()).map_err(Clone::clone))
        .collect()
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn judge_ratio(ratio: &Ratio, of: &Rounds, to: &Rounds) -> Verdict {
    let verdict = Verdict {
        name: ratio.name.clone(),
        value: None,
        range: None,
        unit: "x",
        is_limit: false,
        threshold: ratio.threshold,
        target: ratio.target,
        note: String::new(),
    };
    let costs = costs_text(of);
    match (throughputs(of), throughputs(to)) {
        (Ok(of), Ok(to)) if !of.is_empty() && to.iter().all(|&value| value > 0.0) => {
            // Each round measures numerator and denominator in succession.
            let each: Vec<f64> = of.iter().zip(&to).map(|(of, to)| of / to).collect();
            let (least, most) = each
                .iter()
                .fold((f64::INFINITY, 0_f64), |(least, most), &value| (least.min(value), most.max(value)));
            Verdict {
                value: Some(median(&each)),
                range: Some((least, most)),
                note: format!("{:.0} / {:.0} ops/s{costs}", median(&of), median(&to)),
                ..verdict
            }
        }
        (Err(error), _) | (_, Err(error)) => Verdict { note: error, ..verdict },
        _ => Verdict { note: "no round was measured".to_owned(), ..verdict },
    }
}

/// The costs of an access in the last round that was measured, such as `; 94.6 % hits, 5.1 + 4.9 core-us, 0.05 IOs`.
fn costs_text(rounds: &Rounds) -> String {
    let Some(outcome) = rounds.iter().rev().find_map(|outcome| outcome.as_ref().ok()) else {
        return String::new();
    };
    let hits = outcome.hit_ratio.map(|ratio| format!("{:.1} % hits", ratio * 100.0));
    let times = outcome.costs.server_us.zip(outcome.costs.client_us);
    let times = times.map(|(server, client)| format!("{server:.1} + {client:.1} core-us"));
    let ios = outcome.costs.ios.map(|ios| format!("{ios:.2} IOs"));
    let parts: Vec<String> = [hits, times, ios].into_iter().flatten().collect();
    if parts.is_empty() { String::new() } else { format!("; {}", parts.join(", ")) }
}

/// The steps of a moving average of throughput: half a second.
const WINDOW: usize = 5;
/// The share of the earlier throughput at which a point counts as recovered.
const RECOVERED_SHARE: f64 = 0.95;

/// The effect of a switch of the hotspot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dip {
    /// The drop of throughput in the worst half second after the switch, in percent.
    pub drop_percent: f64,
    /// The time from the switch to the end of the first half second with 95 % of the earlier throughput, not before the
    /// worst one; `None` without recovery.
    pub recovery_s: Option<f64>,
}

/// Evaluates a timeline whose hotspot switches at step `switch`, relative to the two seconds before.
pub fn dip(timeline: &[u64], switch: usize) -> Option<Dip> {
    let earlier = timeline.get(switch.saturating_sub(20)..switch).filter(|steps| steps.len() >= WINDOW)?;
    let before = earlier.iter().sum::<u64>() as f64 / earlier.len() as f64;
    let means: Vec<f64> = timeline
        .get(switch..)?
        .windows(WINDOW)
        .map(|steps| steps.iter().sum::<u64>() as f64 / WINDOW as f64)
        .collect();
    let (worst, least) =
        means.iter().copied().enumerate().min_by(|(_, one), (_, other)| one.total_cmp(other))?;
    if before == 0.0 {
        return None;
    }
    let is_recovered = |&(_, mean): &(usize, &f64)| *mean >= RECOVERED_SHARE * before;
    // Throughput that never fell below 95 % needs no recovery.
    let from = if least >= RECOVERED_SHARE * before { 0 } else { worst };
    let recovered = means.iter().enumerate().skip(from).find(is_recovered).map(|(index, _)| index);
    Some(Dip {
        drop_percent: (1.0 - least / before).max(0.0) * 100.0,
        recovery_s: recovered.map(|index| match least >= RECOVERED_SHARE * before {
            true => 0.0,
            false => (index + WINDOW) as f64 * STEP.as_secs_f64(),
        }),
    })
}

/// The verdicts on the drop and on the recovery time, by the median of the rounds.
fn judge_switch(switch: &Switch, rounds: &Rounds, percent: u32) -> [Verdict; 2] {
    let verdict = |limit: &str, unit, threshold| Verdict {
        name: format!("{}: {limit}", switch.name),
        value: None,
        range: None,
        unit,
        is_limit: true,
        threshold,
        target: None,
        note: String::new(),
    };
    let mut drop = verdict("drop", "%", switch.drop_percent_max);
    let mut recovery = verdict("recovery", "s", switch.recovery_s_max);
    let dips: Result<Vec<Dip>, String> = rounds
        .iter()
        .map(|outcome| {
            let timeline = &outcome.as_ref().map_err(Clone::clone)?.measured.timeline;
            dip(timeline, timeline.len() * percent as usize / 100)
                .ok_or("the timeline is too short".to_owned())
        })
        .collect();
    match dips {
        Ok(dips) if !dips.is_empty() => {
            drop.value = Some(median(&dips.iter().map(|dip| dip.drop_percent).collect::<Vec<_>>()));
            let times: Vec<f64> = dips.iter().map(|dip| dip.recovery_s.unwrap_or(f64::INFINITY)).collect();
            recovery.value = Some(median(&times)).filter(|time| time.is_finite());
            if recovery.value.is_none() {
                recovery.note = "no recovery".to_owned();
            }
        }
        Ok(_) => drop.note = "no round was measured".to_owned(),
        Err(error) => (drop.note, recovery.note) = (error.clone(), error),
    }
    [drop, recovery]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::Costs;
    use crate::plan::Length;
    use crate::workload::Measured;
    use std::path::Path;
    use std::time::Duration;

    pub(super) const PLAN: &str = r#"
        title = "ratios"
        settings = { region = "1G" }
        short = { warm-up-s = 0.0, rewarm-s = 0.0, measured-s = 1.0, repeats = 3 }
        full = { warm-up-s = 0.0, rewarm-s = 0.0, measured-s = 1.0, repeats = 3 }
        [[point]]
        name = "term"
        mode = "term"
        set = { theta = 0.5, switch-at-percent = 50 }
        measured-s = 8.0
        full-warm-up-s = 3.0
        rounds-max = 2
        [[point]]
        name = "pin"
        mode = "pin"
        [[ratio]]
        name = "term/pin"
        of = "term"
        to = "pin"
        threshold = 0.9
        target = 0.97
        [[switch]]
        name = "switch"
        point = "term"
        drop-percent-max = 15.0
        recovery-s-max = 2.0
    "#;

    pub(super) fn outcome(ops: u64, timeline: Vec<u64>) -> Result<Outcome, String> {
        let mut measured = Measured::empty(Duration::from_secs(1));
        (measured.reads, measured.timeline) = (ops, timeline);
        Ok(Outcome {
            measured,
            range_ops_per_s: (0.0, 0.0),
            hit_ratio: None,
            costs: Costs { server_us: Some(5.0), client_us: Some(4.0), ios: None },
            disk: None,
            peak_bytes: None,
            repeats: 1,
        })
    }

    pub(super) fn parse(text: &str) -> Result<RatioPlan, String> {
        RatioPlan::parse(text, Path::new("ratios.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn points_have_common_and_own_settings() {
        assert!(RatioPlan::is_ratio_plan(PLAN));
        let plan = parse(PLAN).unwrap();
        let [short, full] = [Length::Short, Length::Full].map(|length| plan.schedule(length).unwrap());
        assert_eq!((short[0].1.settings.region, short[0].1.settings.theta), (1 << 30, 0.5));
        assert_eq!((short[0].2.measured_s, short[1].2.measured_s), (8.0, 1.0));
        assert_eq!((short[0].2.warm_up_s, full[0].2.warm_up_s), (0.0, 3.0));
        assert_eq!(short[1].1.settings.theta, 0.99);
        let indexes: Vec<usize> = full.iter().map(|(index, ..)| *index).collect();
        assert_eq!(indexes, [0, 1, 0, 1, 1]);
    }

    #[test]
    fn errors_state_the_mistake() {
        for (from, to, expected) in [
            ("of = \"term\"", "of = \"tern\"", "no point is named 'tern'"),
            ("name = \"pin\"", "name = \"term\"", "two points are named 'term'"),
            ("theta = 0.5", "thete = 0.5", "thete"),
            ("theta = 0.5", "theta = 50.0", "theta 50"),
            ("measured-s = 8.0", "measured-s = 0.0", "point 'term': measured-s"),
            (", switch-at-percent = 50", "", "no switch-at-percent"),
        ] {
            let message = parse(&PLAN.replacen(from, to, 1)).expect_err(to);
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn ratios_are_judged_by_the_median_of_the_rounds() {
        let plan = parse(PLAN).unwrap();
        let rounds = |values: [u64; 3]| values.map(|ops| outcome(ops, vec![100; 80])).to_vec();
        for (term, label) in
            [([980, 100, 990], "ok"), ([950, 950, 100], "ok, target MISSED"), ([800; 3], "MISSED")]
        {
            let verdicts = judge(&plan, &[rounds(term), rounds([1000; 3])]);
            assert_eq!(verdicts[0].label(), label, "{verdicts:?}");
            assert_eq!(verdicts.len(), 3);
        }
        let failed = judge(&plan, &[vec![Err("no server".into())], rounds([1000; 3])]);
        assert_eq!((failed[0].label(), failed[0].note.as_str()), ("MISSED", "no server"));
    }

    #[test]
    fn a_dip_is_measured_in_half_seconds() {
        let mut timeline = vec![1000; 80];
        assert_eq!(dip(&timeline, 40), Some(Dip { drop_percent: 0.0, recovery_s: Some(0.0) }));
        timeline[40..50].fill(800);
        let found = dip(&timeline, 40).unwrap();
        assert!((found.drop_percent - 20.0).abs() < 1e-9, "{found:?}");
        // From step 49 on a half second has one bad step: 960 of 1000. It ends 1.4 s after the switch.
        assert!((found.recovery_s.unwrap() - 1.4).abs() < 1e-9, "{found:?}");
        timeline[40..].fill(500);
        assert_eq!(dip(&timeline, 40), Some(Dip { drop_percent: 50.0, recovery_s: None }));
        assert_eq!(dip(&timeline, 2), None);
        assert_eq!(dip(&[0; 80], 40), None);
    }
}
