//! The counters and clients of an export, for `terrace stat`.

use terrace_export::{ExportClientStats, ExportStats};
use terrace_nic::stat::Counts;

use crate::stat::section;
use crate::table;

/// Counters, and a line for each client. With rates if there are counters of `seconds` ago.
pub fn text(now: &ExportStats, before: Option<&ExportStats>, seconds: f64) -> String {
    let mut text = section("export", &counts(now), before.map(counts).as_ref(), seconds);
    if !now.clients.is_empty() {
        let header = ["client", "user", "open files", "locks", "watches", "requests"];
        text += &format!("\nclients of the export\n{}", table::render(&header, &rows(&now.clients)));
    }
    text
}

fn counts(of: &ExportStats) -> Counts {
    let ExportStats { open_files, locks, requests, refused, revoked, clients } = of;
    [
        ("clients", clients.len() as u64),
        ("open_files", *open_files as u64),
        ("locks", *locks as u64),
        ("requests", *requests),
        ("refused", *refused),
        ("revoked", *revoked),
    ]
    .map(|(name, count)| (name.into(), count))
    .into()
}

fn rows(clients: &[ExportClientStats]) -> Vec<Vec<String>> {
    clients
        .iter()
        .map(|of| {
            let counts = [of.open_files as u64, of.locks as u64, of.watches as u64, of.requests];
            let mut row = vec![of.client.clone(), of.uid.to_string()];
            row.extend(counts.map(|count| count.to_string()));
            row
        })
        .collect()
}
