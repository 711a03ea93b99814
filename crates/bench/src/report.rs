//! The report of a run: Markdown with the machine, the ratios and the figures.

use std::fmt::Write;
use std::path::Path;

use crate::ratios;
use crate::results::{Document, FigureResults, ResultsError, Row};

/// Writes `README.md` into the directory of the results.
///
/// # Errors
/// If the file cannot be written.
pub fn write(document: &Document, dir: &Path) -> Result<(), ResultsError> {
    let path = dir.join("README.md");
    std::fs::write(&path, text(document)).map_err(|error| ResultsError { path, error })
}

fn text(document: &Document) -> String {
    let machine = &document.machine;
    let mut text = format!("# Regions larger than memory: a {} run of all plans\n\n", document.length);
    if document.is_rehearsal {
        text += "A rehearsal, without meaningful numbers.\n\n";
    }
    // Writing to a string cannot fail, so results of `writeln!` are ignored.
    let _ = writeln!(text, "Machine: {}. Load average before the run: {}.", machine.line(), machine.load);
    let _ = writeln!(text, "Processors: {}.", document.processors);
    text += "`bench/term/README.md` describes the measurements; all numbers are in the CSV files and in `results.json`.\n\
        Core-us are microseconds of processor time for an access, at the server and at the clients; IOs are pages of the\n\
        region's file that were read or written for an access; lookups are an application's requests for metadata and READs\n\
        of keys.\n";
    if !document.ratios.is_empty() {
        text += "\n## Promised ratios\n\n";
        text += &table(&ratios::HEADER, document.ratios.iter().map(ratios::Verdict::cells));
    }
    for figure in &document.figures {
        text += &section(figure);
    }
    text
}

fn section(results: &FigureResults) -> String {
    let plan = &results.plan;
    let axis = plan.x.as_ref().map_or("", |x| x.label.as_str());
    let header = [
        "mode",
        axis,
        "ops/s",
        "paper",
        "of pin",
        "paper",
        "p50 us",
        "paper",
        "p99 us",
        "paper",
        "hit ratio",
        "core-us server",
        "clients",
        "IOs",
        "lookups",
        "of what the disk allows",
    ];
    let mut text =
        format!("\n## {}: {}\n\n![{}]({}.svg)\n\n", plan.figure, plan.title, plan.title, plan.figure);
    text += &table(&header, results.rows.iter().map(cells));
    let mut sources: Vec<&str> = results.rows.iter().map(|row| &*row.paper_source).collect();
    sources.retain(|source| !source.is_empty());
    sources.dedup();
    if !sources.is_empty() {
        let _ = writeln!(text, "\nThe paper's values: {}.", sources.join("; "));
    }
    for row in results.rows.iter().filter(|row| !row.error.is_empty()) {
        let _ = writeln!(text, "\n{} {} FAILED: {}", row.mode, row.x, row.error);
    }
    text
}

fn cells(row: &Row) -> Vec<String> {
    let number =
        |value: Option<f64>, digits: usize| value.map_or(String::new(), |value| format!("{value:.digits$}"));
    vec![
        row.mode.clone(),
        row.x.clone(),
        number(row.ops_per_s, 0),
        number(row.paper_ops_per_s, 0),
        number(row.of_pin, 2),
        number(row.paper_of_pin, 2),
        number(row.p50_us, 1),
        number(row.paper_p50_us, 1),
        number(row.p99_us, 1),
        number(row.paper_p99_us, 1),
        row.hit_ratio.map_or(String::new(), |ratio| format!("{:.1} %", ratio * 100.0)),
        number(row.server_core_us, 1),
        number(row.client_core_us, 1),
        number(row.ios_per_access, 2),
        number(row.lookups_per_access, 2),
        row.share_of_disk_text(),
    ]
}

fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut text = format!("| {} |\n|{}\n", header.join(" | "), "---|".repeat(header.len()));
    for row in rows {
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_as_many_columns_as_titles() {
        let rows = [vec!["1".to_owned(), String::new()]].into_iter();
        assert_eq!(table(&["a", "b"], rows), "| a | b |\n|---|---|\n| 1 |  |\n");
    }
}
