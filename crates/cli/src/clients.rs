//! The clients of a memory node, for `terrace stat`.

use terrace_node::{ClientRegionStats, ClientStats};

use crate::{stat, table};

const MIB: f64 = (1 << 20) as f64;

/// A line for each client and region. With rates for clients that are in `before`, of `seconds` ago.
pub fn text(now: &[ClientStats], before: &[ClientStats], seconds: f64) -> String {
    let mut header = vec!["client", "one-sided", "fetched", "region", "RPC reads", "RPC writes", "failed"];
    header.extend(["MiB read", "MiB written", "p50 us", "p90 us", "p99 us", "p99.9 us", "max us"]);
    if !before.is_empty() {
        header.extend(["one-sided/s", "RPCs/s"]);
    }
    let rows: Vec<Vec<String>> = now
        .iter()
        .flat_map(|client| {
            let then = before.iter().find(|then| then.client == client.client);
            client_rows(client, then, (!before.is_empty()).then_some(seconds))
        })
        .collect();
    format!("\nclients\n{}", table::render(&header, &rows))
}

/// The lines of a client. Counts over all regions are in the first line only.
fn client_rows(now: &ClientStats, before: Option<&ClientStats>, seconds: Option<f64>) -> Vec<Vec<String>> {
    let nothing = ClientRegionStats { region: "-".into(), ..ClientRegionStats::default() };
    let regions = if now.regions.is_empty() { std::slice::from_ref(&nothing) } else { &now.regions };
    let rate = |now: u64, then: Option<u64>| {
        seconds.map(|seconds| then.map_or("-".into(), |then| stat::rate(now, then, seconds).to_string()))
    };
    let row = |(index, of): (usize, &ClientRegionStats)| {
        let first = |value: String| if index == 0 { value } else { String::new() };
        let mut row = vec![first(now.client.clone()), first(now.one_sided.to_string())];
        row.extend([first(now.fetched.to_string()), of.region.clone()]);
        row.extend([of.reads, of.writes, of.failed].map(|count| count.to_string()));
        row.extend([of.bytes_read, of.bytes_written].map(|bytes| format!("{:.0}", bytes as f64 / MIB)));
        let latency = &of.latency;
        let times = [latency.p50_us, latency.p90_us, latency.p99_us, latency.p999_us, latency.latency_us_max];
        row.extend(times.map(|us| format!("{us:.0}")));
        let then = before.and_then(|then| then.regions.iter().find(|then| then.region == of.region));
        let one_sided = rate(now.one_sided, before.map(|then| then.one_sided));
        row.extend(one_sided.map(first));
        row.extend(rate(of.reads + of.writes, then.map(|then| then.reads + then.writes)));
        row
    };
    regions.iter().enumerate().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(name: &str, one_sided: u64, reads: u64) -> ClientStats {
        let of = |region: &str, reads| ClientRegionStats {
            region: region.into(),
            reads,
            bytes_read: 3 << 20,
            ..ClientRegionStats::default()
        };
        ClientStats { client: name.into(), one_sided, fetched: 5, regions: vec![of("a", reads), of("b", 1)] }
    }

    #[test]
    fn each_client_has_a_line_for_each_region_and_rates_with_an_earlier_sample() {
        let now = [client("192.0.2.1/0x11", 500, 40), client("192.0.2.2/0x12", 7, 1)];
        let shown = text(&now, &[], 1.0);
        let line = |text: &str, number: usize| -> Vec<String> {
            let line = text.lines().nth(number).unwrap();
            line.split_whitespace().map(str::to_owned).collect()
        };
        // A title above the header.
        assert_eq!(line(&shown, 3)[..8], ["192.0.2.1/0x11", "500", "5", "a", "40", "0", "0", "3"]);
        assert_eq!(line(&shown, 4)[..2], ["b", "1"]);
        assert!(!shown.contains("/s"));
        let shown = text(&now, &[client("192.0.2.1/0x11", 300, 20)], 2.0);
        assert!(line(&shown, 3).ends_with(&["100".into(), "10".into()]), "{shown}");
        assert!(line(&shown, 5).ends_with(&["-".into(), "-".into()]), "{shown}");
    }

    #[test]
    fn a_client_without_rpcs_is_shown() {
        let idle = ClientStats { client: "192.0.2.1/0x11".into(), one_sided: 3, ..ClientStats::default() };
        assert!(text(&[idle], &[], 1.0).contains("192.0.2.1/0x11"));
    }
}
