//! The pages of a pager, and the processes that have them, for `terrace stat`.

use terrace_far_memory::PAGE_BYTES;
use terrace_nic::stat::Counts;
use terrace_pager::PagerStatus;

use crate::table;

/// What is in memory, and a line for each process.
pub fn text(status: &PagerStatus) -> String {
    let mib = |pages: u64| (pages * PAGE_BYTES as u64) >> 20;
    let mut text = format!(
        "\nremote memory: {} of {} local pages used ({} of {} MiB), {} more are not paged\n",
        status.local_pages,
        status.limit_pages,
        mib(status.local_pages),
        mib(status.limit_pages),
        status.unpaged_pages
    );
    if status.processes.is_empty() {
        return text;
    }
    let rows: Vec<Vec<String>> = status
        .processes
        .iter()
        .map(|process| {
            let pid = process.pid.map_or_else(|| "-".into(), |pid| pid.to_string());
            vec![pid, process.local_pages.to_string(), process.far_pages.to_string()]
        })
        .collect();
    text += &table::render(&["process", "local pages", "far pages"], &rows);
    text
}

/// The counters by name.
pub fn counts(status: &PagerStatus) -> Counts {
    let counts = &status.counts;
    let pairs = [
        ("faults", counts.faults),
        ("zeros", counts.zeros),
        ("loads", counts.loads),
        ("stores", counts.stores),
        ("drops", counts.drops),
        ("losses", counts.losses),
        ("prefetches", counts.prefetches),
        ("prefetches_used", counts.prefetches_used),
        ("prefetches_wasted", counts.prefetches_wasted),
    ];
    pairs.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}

#[cfg(test)]
mod tests {
    use terrace_pager::ProcessPages;

    use super::*;

    #[test]
    fn each_process_has_a_line_with_its_pages() {
        let process = |pid, local_pages, far_pages| ProcessPages { pid, local_pages, far_pages };
        let status = PagerStatus {
            limit_pages: 512,
            local_pages: 300,
            unpaged_pages: 7,
            processes: vec![process(Some(42), 200, 1000), process(None, 100, 0)],
            ..PagerStatus::default()
        };
        let text = text(&status);
        assert!(text.contains("300 of 512 local pages used (1 of 2 MiB), 7 more"), "{text}");
        let rows: Vec<Vec<&str>> =
            text.lines().skip(3).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows, [["42", "200", "1000"], ["-", "100", "0"]]);
    }
}
