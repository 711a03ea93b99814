//! The plans in the repository: each is valid, and runs of all plans have limited durations.

use std::path::{Path, PathBuf};
use std::time::Duration;

use terrace_bench::plan::Length;
use terrace_bench::runner::estimates;
use terrace_bench::session::{Input, Options, run};
use terrace_bench::test_harness::Rehearsal;

fn plans() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/term");
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut plans: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|end| end == "toml")).collect();
    plans.sort();
    plans
}

#[test]
fn every_plan_is_valid_and_named_as_its_file() {
    let mut figures = 0;
    for path in plans() {
        match Input::load(&path).unwrap_or_else(|error| panic!("{error}")) {
            Input::Figure(plan) => {
                figures += 1;
                assert_eq!(plan.figure, path.file_stem().unwrap().to_str().unwrap());
                // Each value has a source.
                assert!(plan.paper.iter().all(|stated| !stated.source.is_empty()));
            }
            Input::Ratios(plan) => {
                assert!(
                    plan.ratios.len() >= 8
                        && [plan.switches.len(), plan.disks.len(), plan.hits.len()] == [1, 1, 2]
                )
            }
        }
    }
    assert!(figures >= 21, "{figures} figures");
}

/// The estimated duration of a run of all plans.
fn estimate(length: Length) -> Duration {
    let mut total = Duration::ZERO;
    for path in plans() {
        let points = Input::load(&path).unwrap().points(length).unwrap();
        let estimate = estimates(&points).iter().sum::<Duration>();
        eprintln!("{length:?} {}: {} points, {estimate:?}", path.display(), points.len());
        total += estimate;
    }
    eprintln!("{length:?}: {total:?}");
    total
}

// A tenth is reserved for durations that are not estimated, such as a slow end of servers.

#[test]
fn a_short_run_of_all_plans_takes_a_quarter_of_an_hour() {
    assert!(estimate(Length::Short) < Duration::from_secs(27 * 30));
}

#[test]
fn a_full_run_of_all_plans_takes_less_than_33_minutes() {
    assert!(estimate(Length::Full) < Duration::from_secs(27 * 66));
}

#[test]
fn a_rehearsal_writes_all_files_of_a_figure_and_of_ratios() {
    let out = tempfile::tempdir().unwrap();
    let figure = "figure = \"f\"\ntitle = \"t\"\nsource = \"s\"\nkind = \"latency\"\nmodes = [\"pin\", \"term\"]\n\
        short = { warm-up-s = 0.0, rewarm-s = 0.0, measured-s = 0.2, repeats = 2 }\n";
    let ratios = "title = \"r\"\n\
        short = { warm-up-s = 0.0, rewarm-s = 0.0, measured-s = 0.2, repeats = 2 }\n\
        full = { warm-up-s = 0.0, rewarm-s = 0.0, measured-s = 0.2, repeats = 2 }\n\
        point = [{ name = \"a\", mode = \"pin\" }, { name = \"b\", mode = \"term\" }]\n\
        ratio = [{ name = \"never\", of = \"a\", to = \"b\", threshold = 1000.0 }]\n";
    let mut inputs = Vec::new();
    for (name, text) in [("f.toml", figure), ("r.toml", ratios)] {
        std::fs::write(out.path().join(name), text).unwrap();
        inputs.push(Input::load(&out.path().join(name)).unwrap());
    }
    let options = Options {
        length: Length::Short,
        modes: Vec::new(),
        out: out.path().join("results"),
        data: out.path().to_owned(),
        is_rehearsal: true,
    };
    let summary = run(inputs, &mut Rehearsal::default(), &options).unwrap();
    assert_eq!((summary.failed, summary.missed), (0, 1));
    assert!(summary.dir.to_str().unwrap().ends_with("-rehearsal"));
    for file in ["f.csv", "f.svg", "f.png", "ratios.csv", "results.json", "README.md"] {
        assert!(summary.dir.join(file).metadata().unwrap().len() > 0, "{file}");
    }
    let report = std::fs::read_to_string(summary.dir.join("README.md")).unwrap();
    assert!(report.contains("(f.svg)") && report.contains("MISSED") && report.contains("cores"), "{report}");
    let csv = std::fs::read_to_string(summary.dir.join("ratios.csv")).unwrap();
    assert!(csv.contains("MISSED"), "{csv}");
}
