//! The pages of a memory node, and who has them, for `terrace stat` and `terrace memory-node --status`.

use terrace_far_memory::{ClientPages, NodeStatus, PAGE_BYTES, Scheme};

use crate::table;

/// The pool in a line, and a line for each client.
pub fn text(status: &NodeStatus) -> String {
    let mib = |pages: u64| (pages * PAGE_BYTES as u64) >> 20;
    let baseline = match status.scheme {
        Scheme::Odrp => String::new(),
        other => format!(", by {other}, a baseline"),
    };
    let mut text = format!(
        "\nmemory node: {} of {} pages free ({} of {} MiB), {} repairs{baseline}\n",
        status.free_pages,
        status.page_count,
        mib(status.free_pages),
        mib(status.page_count),
        status.repairs
    );
    if status.clients.is_empty() {
        return text;
    }
    let header = ["client", "address", "pages", "budget", "space", "loads", "stores", "new pages", "freed"];
    let rows: Vec<Vec<String>> = status
        .clients
        .iter()
        .map(|client| {
            let counts = [
                client.pages,
                status.budget_pages,
                client.page_count,
                client.loads,
                client.mapped_stores,
                client.unmapped_stores,
                client.invalidations,
            ];
            let counts = counts.map(|count| count.to_string());
            [client.name.clone(), client.address.to_string()].into_iter().chain(counts).collect()
        })
        .collect();
    text += &table::render(&header, &rows);
    text
}

/// A metric of each client.
type ClientMetric = (&'static str, &'static str, &'static str, fn(&ClientPages) -> u64);

const CLIENT_METRICS: [ClientMetric; 5] = [
    ("client_pages", "gauge", "Pages of the pool that the client has.", |client| client.pages),
    ("client_loads_total", "counter", "Pages loaded, modulo 2^29.", |client| client.loads),
    ("client_mapped_stores_total", "counter", "Stores into pages that it had.", |client| {
        client.mapped_stores
    }),
    ("client_unmapped_stores_total", "counter", "Stores that have taken a page.", |client| {
        client.unmapped_stores
    }),
    ("client_invalidations_total", "counter", "Pages returned.", |client| client.invalidations),
];

/// The state for Prometheus, in the text exposition format.
pub fn exposition(status: &NodeStatus) -> String {
    let mut text = String::new();
    for (name, kind, help, value) in [
        ("pages", "gauge", "Pages of the pool.", status.page_count),
        ("free_pages", "gauge", "Pages that nobody has.", status.free_pages),
        ("budget_pages", "gauge", "Pages that a client may have.", status.budget_pages),
        ("repairs_total", "counter", "Repairs of the free-page queue.", status.repairs),
    ] {
        text += &format!(
            "# HELP terrace_pool_{name} {help}\n# TYPE terrace_pool_{name} {kind}\nterrace_pool_{name} {value}\n"
        );
    }
    for (name, kind, help, value) in CLIENT_METRICS {
        text += &format!("# HELP terrace_pool_{name} {help}\n# TYPE terrace_pool_{name} {kind}\n");
        for (index, client) in status.clients.iter().enumerate() {
            let label: String = client.name.chars().map(escaped).collect();
            let address = client.address;
            // Two clients may have one name.
            text += &format!(
                "terrace_pool_{name}{{client=\"{label}\",address=\"{address}\",index=\"{index}\"}} {}\n",
                value(client)
            );
        }
    }
    text
}

/// A character of a label's value. Clients choose their names.
fn escaped(character: char) -> char {
    match character {
        '"' | '\\' => '_',
        other if other.is_control() => '_',
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(name: &str) -> NodeStatus {
        let client = ClientPages {
            name: name.into(),
            address: [192, 0, 2, 1].into(),
            page_count: 1024,
            pages: 77,
            loads: 1,
            mapped_stores: 2,
            unmapped_stores: 80,
            invalidations: 3,
        };
        NodeStatus {
            scheme: Scheme::Odrp,
            page_count: 1024,
            free_pages: 947,
            budget_pages: 512,
            repairs: 0,
            clients: vec![client],
        }
    }

    #[test]
    fn a_client_cannot_forge_metrics_by_its_name() {
        let text = exposition(&status("x\"} 1\nterrace_pool_pages 7\\"));
        assert!(text.contains("terrace_pool_free_pages 947\n"), "{text}");
        let name = "x_} 1_terrace_pool_pages 7_";
        let line =
            format!("terrace_pool_client_pages{{client=\"{name}\",address=\"192.0.2.1\",index=\"0\"}} 77\n");
        assert!(text.contains(&line), "{text}");
        assert!(
            text.lines().all(|line| line.starts_with("# ") || line.starts_with("terrace_pool_")),
            "{text}"
        );
    }

    #[test]
    fn each_client_has_a_line_with_its_pages() {
        let text = text(&status("db"));
        assert!(text.contains("947 of 1024 pages free (3 of 4 MiB)"), "{text}");
        let line: Vec<&str> = text.lines().last().expect("a line").split_whitespace().collect();
        assert_eq!(line, ["db", "192.0.2.1", "77", "512", "1024", "1", "2", "80", "3"]);
    }
}
