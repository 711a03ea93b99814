//! Screens of 80 columns and 24 lines.

use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::sample::Sample;
use super::*;

/// The lines of a screen.
fn lines(screen: &Screen) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
    terminal.draw(|frame| draw(frame, screen)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let text = |y| (0..80).map(|x| buffer[(x, y)].symbol().to_owned()).collect::<String>();
    (0..24).map(|y| text(y).trim_end().to_owned()).collect()
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn line_with<'a>(lines: &'a [String], needle: &str) -> &'a str {
    lines.iter().find(|line| line.contains(needle)).unwrap_or_else(|| panic!("{needle} is not in {lines:#?}"))
}

fn counts(pairs: &[(&str, u64)]) -> Counts {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}

/// A process with a region and some queue pairs, after so many accesses.
fn process(pid: u32, steps: u64, pairs: u32) -> Process {
    let region = RegionStats {
        name: "table".into(),
        len_bytes: 64 << 20,
        resident_bytes: 16 << 20,
        hits: 900 * steps,
        misses: 100 * steps,
        pages_read: 100 * steps,
        ..RegionStats::default()
    };
    let memory = MemoryStats {
        budget_bytes: 16 << 20,
        resident_bytes: 16 << 20,
        regions: vec![region],
        ..MemoryStats::default()
    };
    let pair = |qpn: u32| QpSnapshot {
        qpn,
        kind: "RC".into(),
        state: "RTS".into(),
        remote: Some("192.0.2.1".into()),
        send_queue_len: 16,
        counts: counts(&[
            ("requests", 50 * steps),
            ("tx_bytes", u64::from(qpn) * (1 << 20) * steps),
            ("retransmits", 3 * steps),
        ]),
        ..QpSnapshot::default()
    };
    let device = DeviceSnapshot {
        pid,
        addresses: vec!["192.0.2.2".into()],
        port: counts(&[
            ("tx_packets", 200 * steps),
            ("rx_packets", 20_000 * steps),
            ("tx_bytes", (4 << 20) * steps),
            ("rx_bytes", 0),
            ("rx_overflows", 0),
        ]),
        queue_pairs: (1..=pairs).map(pair).collect(),
        reports: [("memory".to_owned(), serde_json::to_value(memory).unwrap())].into(),
        ..DeviceSnapshot::default()
    };
    Process { pid, program: "program".into(), answer: Ok(vec![device]) }
}

/// A screen after two samples, two seconds apart.
fn screen(processes: impl Fn(u64) -> Vec<Process>) -> Screen {
    let start = Instant::now();
    let mut screen = Screen::new(Sample { at: start, processes: processes(1) }, 2);
    screen.add(Sample { at: start + Duration::from_secs(2), processes: processes(3) });
    screen
}

#[test]
fn without_a_process_the_screen_says_what_to_do() {
    let lines = lines(&screen(|_| Vec::new()));
    assert!(
        lines[0].starts_with("terrace top: 0 processes, every 2 s")
            && lines[0].ends_with("q quits, arrows choose")
    );
    line_with(&lines, "no process runs with Terrace");
    line_with(&lines, "terrace run -- ib_write_bw");
    line_with(&lines, "terrace doctor");
}

#[test]
fn rates_regions_and_queue_pairs_fit_the_screen() {
    let lines = lines(&screen(|steps| vec![process(4242, steps, 2)]));
    assert_eq!(
        words(line_with(&lines, "192.0.2.2")),
        ["4242", "program", "192.0.2.2", "2", "200", "20.0k", "4"]
    );
    line_with(&lines, "tx packets 200");
    line_with(&lines, "retransmits 6");
    line_with(&lines, "regions: 16 of 16 MiB resident");
    let region = ["table", "███░░░░░░░", "25", "%", "64", "90.0", "900", "100", "100", "0", "16"];
    assert_eq!(words(line_with(&lines, "table")), region);
    let pairs = ["0x000002", "RC", "RTS", "192.0.2.1", "16", "0", "50", "2", "3"];
    assert_eq!(words(line_with(&lines, "0x000002")), pairs);
}

#[test]
fn the_most_active_queue_pairs_come_first_and_others_are_counted() {
    let lines = lines(&screen(|steps| vec![process(7, steps, 40)]));
    let numbers: Vec<&str> =
        lines.iter().filter(|line| line.starts_with("0x")).map(|line| words(line)[0]).collect();
    assert_eq!(numbers[..2], ["0x000028", "0x000027"]);
    line_with(&lines, &format!("({} more: terrace stat PID)", 40 - numbers.len()));
}

#[test]
fn the_chosen_process_stays_on_the_screen() {
    let mut many = screen(|steps| (1..=9).map(|pid| process(pid, steps, 1)).collect());
    line_with(&lines(&many), "process 1 (program)");
    many.chosen = Some(9);
    let shown = lines(&many);
    line_with(&shown, "process 9 (program)");
    line_with(&shown, "processes (5 more)");
    assert!(shown.iter().any(|line| line.starts_with("9 ")), "{shown:#?}");
}

#[test]
fn a_process_that_does_not_answer_says_why() {
    let silent = |_| {
        vec![Process { pid: 5, program: "other".into(), answer: Err("only its own user and root".into()) }]
    };
    let lines = lines(&screen(silent));
    assert!(line_with(&lines, "5 ").contains("other"));
    assert_eq!(lines.iter().filter(|line| line.contains("only its own user and")).count(), 2, "{lines:#?}");
}

#[test]
fn a_first_sample_has_no_rates() {
    let first = Screen::new(Sample { at: Instant::now(), processes: vec![process(7, 1, 1)] }, 1);
    assert_eq!(words(line_with(&lines(&first), "192.0.2.2"))[4..], ["-", "-", "-"]);
}

#[test]
fn any_size_of_terminal_is_drawn() {
    let screen = screen(|steps| vec![process(1, steps, 3)]);
    for (width, height) in [(1, 1), (10, 3), (40, 8), (200, 60)] {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, &screen)).unwrap();
    }
}
