//! Regions larger than memory, for `terrace stat`.

use terrace_pages::{MemoryStats, RegionStats};

use crate::{stat, table};

const MIB: f64 = (1 << 20) as f64;

/// The memory and its regions. With rates if `before`, of `seconds` ago, is given.
pub fn text(now: &MemoryStats, before: Option<&MemoryStats>, seconds: f64) -> String {
    let mut text = format!(
        "\nmemory\n  {:.0} MiB of {:.0} MiB resident, {:.0} MiB of them dirty, at most {:.0} MiB for buffers, {} requests \
         in flight\n\n",
        now.resident_bytes as f64 / MIB,
        now.budget_bytes as f64 / MIB,
        now.dirty_bytes as f64 / MIB,
        now.buffer_bytes as f64 / MIB,
        now.io_in_flight,
    );
    let mut header = vec!["region", "MiB", "resident", "hits", "misses", "hit ratio", "read", "placed"];
    header.extend(["evicted", "written", "taken over", "errors", "p50 us", "p90 us", "p99 us", "p99.9 us"]);
    header.push("max us");
    if before.is_some() {
        header.extend(["hits/s", "misses/s", "read/s", "written/s"]);
    }
    let rows: Vec<Vec<String>> = now.regions.iter().map(|region| row(region, before, seconds)).collect();
    text += &table::render(&header, &rows);
    for region in now.regions.iter().filter(|region| region.is_failing) {
        text += &format!(
            "{}: pages cannot be written to the file: they stay in memory, and flushes of them fail\n",
            name_of(region)
        );
    }
    text
}

/// The region's name, or its address.
pub fn name_of(region: &RegionStats) -> String {
    if region.name.is_empty() { format!("{:#x}", region.addr) } else { region.name.clone() }
}

fn row(now: &RegionStats, before: Option<&MemoryStats>, seconds: f64) -> Vec<String> {
    let mut row = vec![
        name_of(now),
        format!("{:.0}", now.len_bytes as f64 / MIB),
        format!("{:.0}", now.resident_bytes as f64 / MIB),
        now.hits.to_string(),
        now.misses.to_string(),
        hit_ratio(now),
        now.pages_read.to_string(),
        now.pages_placed.to_string(),
        now.evictions.to_string(),
        now.pages_written.to_string(),
        now.pages_adopted.to_string(),
        now.errors.to_string(),
    ];
    let latency = &now.latency;
    let times = [latency.p50_us, latency.p90_us, latency.p99_us, latency.p999_us, latency.latency_us_max];
    row.extend(times.map(|us| format!("{us:.0}")));
    if let Some(before) = before {
        let nothing = RegionStats::default();
        let then = before.regions.iter().find(|region| region.addr == now.addr).unwrap_or(&nothing);
        let counts =
            |region: &RegionStats| [region.hits, region.misses, region.pages_read, region.pages_written];
        let rates = counts(now).into_iter().zip(counts(then));
        row.extend(rates.map(|(now, then)| stat::rate(now, then, seconds).to_string()));
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
    use super::*;

    #[test]
    fn pages_are_counted_and_rates_need_an_earlier_sample() {
        let region = |hits, pages_read| RegionStats {
            addr: 0x7000,
            len_bytes: 64 << 20,
            resident_bytes: 16 << 20,
            hits,
            misses: pages_read + 10,
            pages_read,
            pages_placed: 3,
            evictions: 5,
            pages_written: 7,
            ..RegionStats::default()
        };
        let stats = |hits, read| MemoryStats { regions: vec![region(hits, read)], ..MemoryStats::default() };
        let shown = text(&stats(60, 30), None, 1.0);
        let cells: Vec<&str> = shown.lines().last().unwrap().split_whitespace().collect();
        let start = ["0x7000", "64", "16", "60", "40", "60.0", "%", "30", "3", "5", "7", "0", "0"];
        assert_eq!(cells[..13], start);
        let mut named = stats(60, 30);
        (named.regions[0].name, named.regions[0].is_failing) = ("table".into(), true);
        let text_of_named = text(&named, None, 1.0);
        assert!(
            text_of_named.contains("\ntable ") && text_of_named.contains("table: pages cannot be written")
        );
        assert!(!shown.contains("/s"));
        let shown = text(&stats(60, 30), Some(&stats(20, 10)), 2.0);
        let cells: Vec<&str> = shown.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(cells[cells.len() - 4..], ["20", "10", "10", "0"]);
    }

    #[test]
    fn an_unused_region_has_no_ratio() {
        assert_eq!(hit_ratio(&RegionStats::default()), "-");
    }
}
