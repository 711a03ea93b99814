//! The counters of a swap device, for `terrace stat` and Prometheus.

use terrace_far_memory::{Client, NodeState};
use terrace_nbd::Totals;
use terrace_nic::stat::Counts;

/// A metric: its name, kind and help.
type Metric<T> = (&'static str, &'static str, &'static str, fn(&T) -> u64);

const METRICS: [Metric<Totals>; 6] = [
    ("connections", "gauge", "Connections that are open, or handles of the file.", |totals| {
        totals.connections
    }),
    ("requests_total", "counter", "Requests.", |totals| totals.requests),
    ("failed_requests_total", "counter", "Requests that an error has answered.", |totals| {
        totals.failed_requests
    }),
    ("loaded_pages_total", "counter", "Pages loaded.", |totals| totals.loaded_pages),
    ("stored_pages_total", "counter", "Pages stored.", |totals| totals.stored_pages),
    ("invalidated_pages_total", "counter", "Pages freed.", |totals| totals.invalidated_pages),
];

const NODE_METRICS: [Metric<NodeState>; 6] = [
    ("node_is_used", "gauge", "1, or 0 while the memory node is lost.", |node| {
        u64::from(node.lost.is_none())
    }),
    ("node_pages", "gauge", "Pages that the device has there.", |node| node.pages),
    ("node_missing_pages", "gauge", "Pages that should have a copy there.", |node| node.missing_pages),
    ("node_losses_total", "counter", "How often the node was lost.", |node| node.losses),
    ("node_rejoins_total", "counter", "How often the node has joined again.", |node| node.rejoins),
    ("node_copied_pages_total", "counter", "Pages copied to it then.", |node| node.copied_pages),
];

/// The counters by name.
pub fn counts(totals: &Totals) -> Counts {
    let name = |name: &str| name.trim_end_matches("_total").to_owned();
    METRICS.iter().map(|metric| (name(metric.0), metric.3(totals))).collect()
}

/// The state for Prometheus, in the text exposition format.
pub fn exposition(totals: &Totals, client: &Client) -> String {
    text(totals, client.stored_pages(), &client.nodes())
}

fn text(totals: &Totals, pages: u64, nodes: &[NodeState]) -> String {
    let head = |name: &str, kind: &str, help: &str| {
        format!("# HELP terrace_swap_{name} {help}\n# TYPE terrace_swap_{name} {kind}\n")
    };
    let mut text =
        head("pages", "gauge", "Pages that are stored.") + &format!("terrace_swap_pages {pages}\n");
    for (name, kind, help, value) in METRICS {
        text += &(head(name, kind, help) + &format!("terrace_swap_{name} {}\n", value(totals)));
    }
    for (name, kind, help, value) in NODE_METRICS {
        text += &head(name, kind, help);
        for node in nodes {
            text += &format!("terrace_swap_{name}{{node=\"{}\"}} {}\n", node.address, value(node));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_and_nodes_are_metrics() {
        let totals = Totals { requests: 9, stored_pages: 4, ..Totals::default() };
        let node = NodeState {
            address: ([192, 0, 2, 1], 7474).into(),
            pages: 7,
            missing_pages: 3,
            lost: None,
            losses: 2,
            rejoins: 2,
            copied_pages: 40,
        };
        let text = text(&totals, 4, &[node]);
        for line in [
            "terrace_swap_pages 4",
            "terrace_swap_requests_total 9",
            "terrace_swap_node_is_used{node=\"192.0.2.1:7474\"} 1",
            "terrace_swap_node_missing_pages{node=\"192.0.2.1:7474\"} 3",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        assert_eq!(counts(&totals)["stored_pages"], 4);
    }
}
