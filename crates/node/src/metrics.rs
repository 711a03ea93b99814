//! A memory node's counters for Prometheus: in the text exposition format (version 0.0.4), over HTTP at `/metrics`.

use std::fmt::Write;
use std::net::SocketAddr;

use terrace_faults::Faults;
use terrace_pages::{LatencyStats, MemoryStats, RegionStats};

use crate::http::{Answer, HttpServer};
use crate::server::{ServeError, Server};
use crate::serving::{ClientRegionStats, ClientStats};

/// The text exposition format.
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A server of metrics, which stops when it is dropped.
pub struct Metrics {
    http: HttpServer,
}

impl Metrics {
    /// Listens at an address for HTTP requests. Port 0 chooses a free one.
    ///
    /// # Errors
    /// `Metrics` if it cannot listen there.
    pub fn serve(addr: SocketAddr, server: &Server) -> Result<Metrics, ServeError> {
        let (memory, agent) = server.sources();
        let faults = server.device().faults().cloned();
        Metrics::serve_text(addr, move || {
            let mut body = exposition(&memory.stats(), &agent.clients());
            write_faults(&mut body, faults.as_deref());
            body
        })
    }

    /// Listens at an address for HTTP requests, which a text in the exposition format answers. Port 0 chooses a free one.
    ///
    /// # Errors
    /// `Metrics` if it cannot listen there.
    pub fn serve_text(
        addr: SocketAddr,
        text: impl Fn() -> String + Send + 'static,
    ) -> Result<Metrics, ServeError> {
        let answer = move |path: &str| match path {
            "/metrics" => Answer { status: "200 OK", content_type: CONTENT_TYPE, body: text() },
            _ => {
                let body = "metrics are at /metrics\n".into();
                Answer { status: "404 Not Found", content_type: "text/plain", body }
            }
        };
        let http = HttpServer::serve(addr, answer);
        let http = http.map_err(|error| ServeError::Metrics { addr, reason: error.to_string() })?;
        Ok(Metrics { http })
    }

    /// The listening address.
    pub fn addr(&self) -> Option<SocketAddr> {
        Some(self.http.addr())
    }
}

/// A metric of each region.
type RegionMetric = (&'static str, &'static str, &'static str, fn(&RegionStats) -> f64);

const REGION_METRICS: [RegionMetric; 14] = [
    ("region_bytes", "gauge", "Length of the region.", |region| region.len_bytes as f64),
    ("resident_bytes", "gauge", "The bytes of the region that are in memory.", |region| {
        region.resident_bytes as f64
    }),
    ("hits_total", "counter", "Accesses that found their page in memory, by page.", |region| {
        region.hits as f64
    }),
    ("misses_total", "counter", "Accesses that did not, by page.", |region| region.misses as f64),
    ("pages_read_total", "counter", "Pages read from the file.", |region| region.pages_read as f64),
    ("pages_placed_total", "counter", "Pages that came into memory without a read.", |region| {
        region.pages_placed as f64
    }),
    ("evictions_total", "counter", "Pages that left memory.", |region| region.evictions as f64),
    ("pages_written_total", "counter", "Pages written to the file.", |region| region.pages_written as f64),
    ("pages_adopted_total", "counter", "Pages taken over from an earlier server.", |region| {
        region.pages_adopted as f64
    }),
    ("write_backs_failed_total", "counter", "Writes to the file that failed.", |region| {
        region.write_backs_failed as f64
    }),
    ("is_failing", "gauge", "1 if the last write to the file failed.", |region| {
        f64::from(u8::from(region.is_failing))
    }),
    ("flushes_total", "counter", "Flushes executed.", |region| region.flushes as f64),
    ("errors_total", "counter", "Accesses that failed.", |region| region.errors as f64),
    ("miss_latency_count", "counter", "Misses whose latency was measured.", |region| {
        region.latency.count as f64
    }),
];

fn exposition(stats: &MemoryStats, clients: &[ClientStats]) -> String {
    let mut text = String::new();
    write_regions(&mut text, stats);
    write_clients(&mut text, clients);
    text
}

// Writing to a string cannot fail, so results of `writeln!` are ignored.

fn write_regions(text: &mut String, stats: &MemoryStats) {
    let regions: Vec<(String, &RegionStats)> =
        stats.regions.iter().map(|region| (escaped(&region.name), region)).collect();
    for (name, help, value) in [
        ("memory_budget_bytes", "The limit on the memory for pages.", stats.budget_bytes),
        ("memory_resident_bytes", "Pages in memory.", stats.resident_bytes),
        ("memory_dirty_bytes", "The part of them that the files lack.", stats.dirty_bytes),
        ("io_in_flight", "Requests in flight to the storage device.", stats.io_in_flight),
    ] {
        let _ = writeln!(
            text,
            "# HELP terrace_{name} {help}\n# TYPE terrace_{name} gauge\nterrace_{name} {value}"
        );
    }
    for (name, kind, help, value) in REGION_METRICS {
        let _ = writeln!(text, "# HELP terrace_{name} {help}\n# TYPE terrace_{name} {kind}");
        for (region, stats) in &regions {
            let _ = writeln!(text, "terrace_{name}{{region=\"{region}\"}} {}", value(stats));
        }
    }
    *text += "# HELP terrace_miss_latency_us Latency of misses.\n# TYPE terrace_miss_latency_us gauge\n";
    for (region, stats) in &regions {
        quantiles(text, "miss_latency_us", &format!("region=\"{region}\""), &stats.latency);
    }
}

fn quantiles(text: &mut String, name: &str, labels: &str, latency: &LatencyStats) {
    let LatencyStats { p50_us, p90_us, p99_us, p999_us, .. } = latency;
    for (quantile, us) in [("0.5", p50_us), ("0.9", p90_us), ("0.99", p99_us), ("0.999", p999_us)] {
        let _ = writeln!(text, "terrace_{name}{{{labels},quantile=\"{quantile}\"}} {us}");
    }
}

/// A metric of each client.
type ClientMetric = (&'static str, &'static str, fn(&ClientStats) -> u64);

const CLIENT_METRICS: [ClientMetric; 2] = [
    ("client_one_sided_total", "One-sided requests of a client that the NIC has accepted.", |client| {
        client.one_sided
    }),
    (
        "client_fetched_total",
        "Reads and writes of absent memory that the NIC requested from the pager for them.",
        |client| client.fetched,
    ),
];

/// A metric of each client and region, by direction: reads, and writes.
type ClientRegionMetric = (&'static str, &'static str, fn(&ClientRegionStats) -> [u64; 2]);

const CLIENT_REGION_METRICS: [ClientRegionMetric; 2] = [
    ("client_rpcs_total", "RPCs of a client that were answered.", |of| [of.reads, of.writes]),
    ("client_rpc_bytes_total", "Bytes of successful RPCs.", |of| [of.bytes_read, of.bytes_written]),
];

fn write_clients(text: &mut String, clients: &[ClientStats]) {
    for (name, help, value) in CLIENT_METRICS {
        let _ = writeln!(text, "# HELP terrace_{name} {help}\n# TYPE terrace_{name} counter");
        for client in clients {
            let _ = writeln!(text, "terrace_{name}{{client=\"{}\"}} {}", client.client, value(client));
        }
    }
    let rows: Vec<(String, &ClientRegionStats)> = clients
        .iter()
        .flat_map(|client| client.regions.iter().map(move |region| (client, region)))
        .map(|(client, of)| (format!("client=\"{}\",region=\"{}\"", client.client, escaped(&of.region)), of))
        .collect();
    for (name, help, values) in CLIENT_REGION_METRICS {
        let _ = writeln!(text, "# HELP terrace_{name} {help}\n# TYPE terrace_{name} counter");
        for (labels, of) in &rows {
            for (direction, value) in ["read", "write"].iter().zip(values(of)) {
                let _ = writeln!(text, "terrace_{name}{{{labels},direction=\"{direction}\"}} {value}");
            }
        }
    }
    *text += "# HELP terrace_client_rpcs_failed_total RPCs that were refused, or failed.\n";
    *text += "# TYPE terrace_client_rpcs_failed_total counter\n";
    for (labels, of) in &rows {
        let _ = writeln!(text, "terrace_client_rpcs_failed_total{{{labels}}} {}", of.failed);
    }
    *text += "# HELP terrace_client_rpc_latency_us Latency of RPCs, from the arrival to the answer.\n";
    *text += "# TYPE terrace_client_rpc_latency_us gauge\n";
    for (labels, of) in &rows {
        quantiles(text, "client_rpc_latency_us", labels, &of.latency);
    }
}

/// Writes the counts of injected faults, if there is a fault plan.
fn write_faults(text: &mut String, faults: Option<&Faults>) {
    let Some(faults) = faults else { return };
    *text += "# HELP terrace_injected_total Faults that the fault plan has injected.\n";
    *text += "# TYPE terrace_injected_total counter\n";
    for (name, count) in faults.counts().named() {
        let _ = writeln!(text, "terrace_injected_total{{fault=\"{name}\"}} {count}");
    }
}

/// The value of a label, escaped.
fn escaped(name: &str) -> String {
    name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_region_has_its_lines_and_names_are_escaped() {
        let region =
            |name: &str| RegionStats { name: name.into(), hits: 7, pages_read: 3, ..Default::default() };
        let regions = vec![region("a"), region("b\"\n")];
        let stats = MemoryStats { budget_bytes: 4096, regions, ..MemoryStats::default() };
        let of = ClientRegionStats { region: "a".into(), writes: 5, failed: 1, ..Default::default() };
        let client = ClientStats { client: "::1/0x11".into(), one_sided: 9, fetched: 2, regions: vec![of] };
        let text = exposition(&stats, &[client]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.contains(&"terrace_memory_budget_bytes 4096"));
        assert!(lines.contains(&"terrace_hits_total{region=\"a\"} 7"));
        assert!(lines.contains(&"terrace_hits_total{region=\"b\\\"\\n\"} 7"));
        assert!(lines.contains(&"terrace_pages_read_total{region=\"a\"} 3"));
        assert!(lines.contains(&"terrace_client_one_sided_total{client=\"::1/0x11\"} 9"));
        let labels = "client=\"::1/0x11\",region=\"a\"";
        let written = format!("terrace_client_rpcs_total{{{labels},direction=\"write\"}} 5");
        assert!(lines.contains(&written.as_str()), "{text}");
        let slow = format!("terrace_client_rpc_latency_us{{{labels},quantile=\"0.999\"}} 0");
        assert!(lines.contains(&slow.as_str()), "{text}");
        let is_comment_or_sample = |line: &&str| line.starts_with("# ") || line.starts_with("terrace_");
        assert!(lines.iter().all(is_comment_or_sample), "{text}");
    }
}
