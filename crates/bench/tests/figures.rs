//! A plan's results on disk: CSV, timeline, JSON and plots.

use std::path::Path;

use terrace_bench::machine::Machine;
use terrace_bench::plan::{Kind, Length, Plan};
use terrace_bench::plot::Figure;
use terrace_bench::results::{Document, FigureResults, Row, Timeline};
use terrace_bench::runner::Runner;
use terrace_bench::test_harness::Rehearsal;

const PLAN: &str = r#"
figure = "figure-8"
title = "READ sizes"
source = "a test"
kind = "KIND"
modes = ["pin", "term"]
AXIS
[settings]
region = "1M"
write-percent = 20
[full]
warm-up-s = 0.0
rewarm-s = 0.0
measured-s = 0.3
repeats = 1
"#;

const AXIS: &str = "[x]\naxis = \"size\"\nlabel = \"Read size\"\nvalues = [\"64\", \"4K\"]\n";
const PAPER: &str =
    "[[paper]]\nmode = \"term\"\nx = \"4K\"\nmetric = \"p99-us\"\nvalue = 12.5\nsource = \"page 3\"\n";

fn results(kind: &str, axis: &str, rest: &str) -> FigureResults {
    let text = PLAN.replace("KIND", kind).replace("AXIS", axis) + rest;
    let plan = Plan::parse(&text, Path::new("test.toml")).unwrap();
    let mut harness = Rehearsal::default();
    let mut runner = Runner::new(&mut harness);
    let timing = plan.timing(Length::Full);
    let mut results = FigureResults { plan: plan.clone(), timing, rows: Vec::new(), timelines: Vec::new() };
    for point in plan.points(Length::Full).unwrap() {
        let outcome = runner.run(&point, &timing);
        results.push(Row::new(&plan, &point, &outcome));
        if plan.kind == Kind::Time {
            results.timelines.push(Timeline::new(&point, &outcome.unwrap()));
        }
    }
    results
}

fn assert_plot(dir: &Path, name: &str, texts: &[&str]) {
    let svg = std::fs::read_to_string(dir.join(format!("{name}.svg"))).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    for text in texts {
        assert!(svg.contains(text), "no '{text}' in the plot");
    }
    let png = std::fs::File::open(dir.join(format!("{name}.png"))).unwrap();
    let mut reader = png::Decoder::new(std::io::BufReader::new(png)).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    assert!(pixels.iter().any(|&byte| byte != 255), "an empty plot");
}

#[test]
fn a_sweep_becomes_csv_and_lines() {
    let dir = tempfile::tempdir().unwrap();
    let results = results("lines", AXIS, PAPER);
    results.write_csv(dir.path()).unwrap();
    let mut csv = csv::Reader::from_path(dir.path().join("figure-8.csv")).unwrap();
    let headers = csv.headers().unwrap().clone();
    let column = |name: &str| headers.iter().position(|header| header == name).expect(name);
    let rows: Vec<csv::StringRecord> = csv.records().map(Result::unwrap).collect();
    assert_eq!(rows.len(), 4);
    let last = &rows[3];
    assert_eq!((&last[column("mode")], &last[column("x")]), ("term", "4K"));
    assert!(last[column("ops_per_s")].parse::<f64>().unwrap() > 0.0);
    assert_eq!((&last[column("paper_p99_us")], &last[column("paper_source")]), ("12.5", "page 3"));
    let number = |row: &csv::StringRecord, name| row[column(name)].parse::<f64>().unwrap();
    let of_pin = number(last, "ops_per_s") / number(&rows[1], "ops_per_s");
    assert!((number(last, "of_pin") / of_pin - 1.0).abs() < 0.01, "{of_pin}");
    assert_eq!(number(&rows[1], "of_pin"), 1.0);
    // Values that the paper does not state stay empty.
    assert_eq!((&last[column("paper_p50_us")], &rows[0][column("paper_p99_us")]), ("", ""));
    Figure::new(&results).write(dir.path(), "figure-8").unwrap();
    assert_plot(dir.path(), "figure-8", &["READ sizes", "Read size", "term", "4K"]);
}

#[test]
fn bars_latencies_and_time_are_drawn() {
    let dir = tempfile::tempdir().unwrap();
    for (kind, axis, texts) in [
        ("bars", AXIS, ["pin", "64"]),
        ("latency", "", ["p99.9", "Latency"]),
        ("time", "", ["Time (s)", "term"]),
    ] {
        let results = results(kind, axis, "");
        results.write_csv(dir.path()).unwrap();
        Figure::new(&results).write(dir.path(), kind).unwrap();
        assert_plot(dir.path(), kind, &texts);
    }
    let mut csv = csv::Reader::from_path(dir.path().join("figure-8.timeline.csv")).unwrap();
    assert_eq!(csv.records().count(), 2 * 3);
}

#[test]
fn a_failed_point_has_a_line_and_the_plot_is_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let mut results = results("lines", AXIS, PAPER);
    let point = results.plan.points(Length::Full).unwrap().remove(3);
    results.rows[3] = Row::new(&results.plan, &point, &Err("WRONG DATA: there".into()));
    results.write_csv(dir.path()).unwrap();
    let csv = std::fs::read_to_string(dir.path().join("figure-8.csv")).unwrap();
    assert!(csv.contains("WRONG DATA: there") && csv.contains("12.5"), "{csv}");
    Figure::new(&results).write(dir.path(), "figure-8").unwrap();
    results.rows.iter_mut().for_each(|row| row.ops_per_s = None);
    Figure::new(&results).write(dir.path(), "figure-8").unwrap();
}

#[test]
fn the_document_has_the_machine() {
    let dir = tempfile::tempdir().unwrap();
    let machine = Machine::describe(dir.path());
    let document = Document {
        processors: "any".into(),
        machine,
        length: "full",
        is_rehearsal: true,
        figures: vec![results("lines", AXIS, "")],
        ratios: Vec::new(),
    };
    document.write(dir.path()).unwrap();
    let text = std::fs::read_to_string(dir.path().join("results.json")).unwrap();
    let read: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(read["machine"]["kernel"].is_string() && read["is_rehearsal"] == true);
    assert_eq!(read["figures"][0]["rows"].as_array().unwrap().len(), 4);
}
