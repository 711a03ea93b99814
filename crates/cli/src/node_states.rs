//! The memory nodes of a pager or a swap device, for `terrace stat` and SIGUSR1.

use terrace_far_memory::NodeState;

use crate::table;

/// A table of the nodes.
pub fn text(nodes: &[NodeState]) -> String {
    let header = ["memory node", "pages", "missing", "lost", "joined again", "copied", "state"];
    let rows: Vec<Vec<String>> = nodes
        .iter()
        .map(|node| {
            let counts = [node.pages, node.missing_pages, node.losses, node.rejoins, node.copied_pages];
            let state = node.lost.as_ref().map_or_else(|| "used".into(), |reason| format!("lost: {reason}"));
            let counts = counts.map(|count| count.to_string());
            [node.address.to_string()].into_iter().chain(counts).chain([state]).collect()
        })
        .collect();
    format!("\n{}", table::render(&header, &rows))
}

/// A line for each node. One that was never lost has only its pages.
pub fn lines(nodes: &[NodeState]) -> String {
    let line = |node: &NodeState| {
        let NodeState { address, pages, missing_pages, lost, losses, rejoins, copied_pages } = node;
        let mut line = format!("  {address}: {pages} pages");
        if *losses > 0 {
            line +=
                &format!(", {missing_pages} missing; lost {losses} times, joined again {rejoins} times, ");
            line += &format!("{copied_pages} pages copied");
        }
        let reason = lost.as_ref().map_or_else(String::new, |reason| format!("; lost: {reason}"));
        line + &reason + "\n"
    };
    nodes.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(port: u16, losses: u64, lost: Option<&str>) -> NodeState {
        NodeState {
            address: ([192, 0, 2, 1], port).into(),
            pages: 7,
            missing_pages: 3,
            lost: lost.map(Into::into),
            losses,
            rejoins: 1,
            copied_pages: 40,
        }
    }

    #[test]
    fn a_node_that_was_lost_has_its_counts_in_its_line() {
        let lines = lines(&[node(1, 0, None), node(2, 2, Some("it has ended"))]);
        let counts =
            "7 pages, 3 missing; lost 2 times, joined again 1 times, 40 pages copied; lost: it has ended";
        assert_eq!(lines, format!("  192.0.2.1:1: 7 pages\n  192.0.2.1:2: {counts}\n"));
    }

    #[test]
    fn each_node_has_a_line_with_its_pages_and_losses() {
        let text = text(&[node(1, 2, None), node(2, 2, Some("it has ended"))]);
        let rows: Vec<Vec<&str>> =
            text.lines().skip(2).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["192.0.2.1:1", "7", "3", "2", "1", "40", "used"]);
        assert_eq!(rows[1][6..], ["lost:", "it", "has", "ended"]);
    }
}
