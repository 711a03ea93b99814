//! The pages of a memory node, and who has them, for `terrace stat` and `terrace memory-node --status`.

use terrace_far_memory::{NodeStatus, PAGE_BYTES};

use crate::table;

/// The pool in a line, and a line for each client.
pub fn text(status: &NodeStatus) -> String {
    let mib = |pages: u64| (pages * PAGE_BYTES as u64) >> 20;
    let mut text = format!(
        "\nmemory node: {} of {} pages free ({} of {} MiB), {} repairs\n",
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

#[cfg(test)]
mod tests {
    use terrace_far_memory::ClientPages;

    use super::*;

    #[test]
    fn each_client_has_a_line_with_its_pages() {
        let client = ClientPages {
            name: "db".into(),
            address: [192, 0, 2, 1].into(),
            page_count: 1024,
            pages: 77,
            loads: 1,
            mapped_stores: 2,
            unmapped_stores: 80,
            invalidations: 3,
        };
        let status = NodeStatus {
            page_count: 1024,
            free_pages: 947,
            budget_pages: 512,
            repairs: 0,
            clients: vec![client],
        };
        let text = text(&status);
        assert!(text.contains("947 of 1024 pages free (3 of 4 MiB)"), "{text}");
        let line: Vec<&str> = text.lines().last().expect("a line").split_whitespace().collect();
        assert_eq!(line, ["db", "192.0.2.1", "77", "512", "1024", "1", "2", "80", "3"]);
    }
}
