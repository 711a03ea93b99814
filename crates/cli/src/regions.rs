//! Regions larger than memory, for `terrace stat`.

use terrace_tier::{RegionStats, TierStats};

use crate::table;

const MIB: f64 = (1 << 20) as f64;

/// The memory and its regions. With rates if `before`, of `seconds` ago, is given.
pub fn text(now: &TierStats, before: Option<&TierStats>, seconds: u64) -> String {
    let mut text = format!(
        "\nmemory\n  {:.0} MiB of {:.0} MiB locked, at most {:.0} MiB for buffers, {} requests in flight\n\n",
        now.locked_bytes as f64 / MIB,
        now.dram_bytes as f64 / MIB,
        now.buffer_bytes as f64 / MIB,
        now.io_in_flight,
    );
    let mut header =
        vec!["region", "MiB", "resident", "hits", "misses", "hit ratio", "mapping", "cached", "buffered"];
    header.extend(["direct", "MiB read", "MiB written", "promoted", "demoted", "errors"]);
    header.extend(["p50 us", "p90 us", "p99 us", "p99.9 us", "max us"]);
    if before.is_some() {
        header.extend(["hits/s", "misses/s", "promoted/s", "demoted/s"]);
    }
    let rows: Vec<Vec<String>> = now.regions.iter().map(|region| row(region, before, seconds)).collect();
    text += &table::render(&header, &rows);
    text
}

fn row(now: &RegionStats, before: Option<&TierStats>, seconds: u64) -> Vec<String> {
    let of_kind =
        |kind: fn(&terrace_tier::KindCounts) -> u64| (kind(&now.reads) + kind(&now.writes)).to_string();
    let mut row = vec![
        if now.name.is_empty() { format!("{:#x}", now.addr) } else { now.name.clone() },
        format!("{:.0}", now.len as f64 / MIB),
        now.units_resident.to_string(),
        now.hits.to_string(),
        now.misses.to_string(),
        hit_ratio(now),
        of_kind(|kinds| kinds.mapping),
        of_kind(|kinds| kinds.cached),
        of_kind(|kinds| kinds.buffered),
        of_kind(|kinds| kinds.direct),
        format!("{:.0}", now.bytes_read as f64 / MIB),
        format!("{:.0}", now.bytes_written as f64 / MIB),
        now.promotions.to_string(),
        now.demotions.to_string(),
        now.errors.to_string(),
    ];
    let latency = &now.latency;
    let times = [latency.p50_us, latency.p90_us, latency.p99_us, latency.p999_us, latency.latency_us_max];
    row.extend(times.map(|us| format!("{us:.0}")));
    if let Some(before) = before {
        let nothing = RegionStats::default();
        let then = before.regions.iter().find(|region| region.addr == now.addr).unwrap_or(&nothing);
        let counts = |region: &RegionStats| [region.hits, region.misses, region.promotions, region.demotions];
        let rates = counts(now).into_iter().zip(counts(then));
        row.extend(rates.map(|(now, then)| (now.saturating_sub(then) / seconds).to_string()));
    }
    row
}

fn hit_ratio(region: &RegionStats) -> String {
    match region.hits + region.misses {
        0 => "-".into(),
        all => format!("{:.1} %", region.hits as f64 / all as f64 * 100.0),
    }
}

#[cfg(test)]
mod tests {
    use terrace_tier::KindCounts;

    use super::*;

    #[test]
    fn misses_are_shown_by_kind_and_rates_with_an_earlier_sample() {
        let region = |hits, direct| RegionStats {
            addr: 0x7000,
            len: 64 << 20,
            units_resident: 16,
            hits,
            misses: direct + 10,
            reads: KindCounts { direct, cached: 3, ..KindCounts::default() },
            writes: KindCounts { buffered: 7, ..KindCounts::default() },
            bytes_read: 5 << 20,
            ..RegionStats::default()
        };
        let stats = |hits, direct| TierStats { regions: vec![region(hits, direct)], ..TierStats::default() };
        let shown = text(&stats(60, 30), None, 1);
        let cells: Vec<&str> = shown.lines().last().unwrap().split_whitespace().collect();
        let start = ["0x7000", "64", "16", "60", "40", "60.0", "%", "0", "3", "7", "30", "5", "0"];
        assert_eq!(cells[..13], start);
        let mut named = stats(60, 30);
        named.regions[0].name = "table".into();
        assert!(text(&named, None, 1).contains("\ntable "));
        assert!(!shown.contains("/s"));
        let shown = text(&stats(60, 30), Some(&stats(20, 10)), 2);
        let cells: Vec<&str> = shown.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(cells[cells.len() - 4..], ["20", "10", "0", "0"]);
    }

    #[test]
    fn an_unused_region_has_no_ratio() {
        assert_eq!(hit_ratio(&RegionStats::default()), "-");
    }
}
