//! `terrace stat`: the counters of the NICs of running processes, as reported by the processes.

use crate::output::{complain, print};
use crate::{clients, exports, far_pages, json, node_states, pool, regions, swap_pages, table};
use clap::Args;
use serde::Deserialize;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};
use terrace_export::ExportStats;
use terrace_far_memory::{NODES_REPORT, NodeState, NodeStatus};
use terrace_nbd::Totals;
use terrace_nic::stat::{Counts, DeviceSnapshot, QpSnapshot, fetch, fetch_all, processes};
use terrace_node::ClientStats;
use terrace_pager::PagerStatus;
use terrace_pages::MemoryStats;

const AFTER_HELP: &str = "\
Examples:
  terrace stat                   # all processes that run with Terrace
  terrace stat 4242              # counters of one process: its port, its queue pairs
  terrace stat --watch 4242      # repeatedly, each second, with rates
  terrace stat --watch=10 4242   # every ten seconds
  terrace stat 4242 --json | jq '.devices[0].port'

Counters that explain low performance: retransmits, timeouts, bad_icrc, and rx_overflows (packets
that the kernel dropped because the receive buffer was full).

A process with --fault-plan also shows the faults that the plan has injected.

A process with --dram has a table of its regions larger than memory: MiB resident; accesses to
resident memory (hits) and to absent memory (misses), by page; pages read from the file, placed
without a read because they were written whole, evicted, written to the file, and taken over from
an earlier server or from what the program has brought into memory; failed accesses; and latencies
of misses. What same-host peers access by themselves is not counted.

A process with --nic commodity has the counters of NP-RDMA: READs and WRITEs that succeeded one-sided
(optimistic); pages that were repeated, because they were the signature page, their version had changed,
they were known to be absent, or an earlier WRITE was repeated; calls, and ranges that the peer held;
requests of peers that were served.

`terrace serve` adds a table of its clients: the requests that the NIC has executed (one-sided;
fetched: transfers of absent memory for them), and RPCs, by region.

`terrace memory-node` adds a table of its clients: the pages that each has, and what its chains have
executed. `terrace memory-node --status ADDRESS:PORT` shows the same from another host.";

/// Options of `terrace stat`.
#[derive(Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct Options {
    /// Process to show; without it, all processes are listed
    pid: Option<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print repeatedly, at this interval
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "1", value_parser = clap::value_parser!(u64).range(1..))]
    watch: Option<u64>,
}

/// An error of querying processes.
#[derive(Debug, thiserror::Error)]
pub enum StatError {
    /// The kernel's list of sockets cannot be read.
    #[error("cannot list the processes that run with Terrace: {0}")]
    List(#[source] io::Error),
    /// The process has no NIC.
    #[error(
        "process {0} does not run with Terrace, or has not opened its device (`terrace stat` lists those that have)"
    )]
    NoDevice(u32),
    /// The process has a NIC, but does not answer.
    #[error("process {0} does not answer: {1}")]
    NoAnswer(u32, #[source] io::Error),
    /// Standard output is closed or full.
    #[error("cannot write: {0}")]
    Output(#[from] io::Error),
}

/// Shows the counters, once or until interrupted.
pub fn show(options: &Options) -> Result<(), StatError> {
    let mut before: Option<Sample> = None;
    loop {
        let text = match options.pid {
            None => list(options.json)?,
            Some(pid) => match (snapshots(pid), &before) {
                (Ok(devices), _) => {
                    let now = Sample { devices, at: Instant::now() };
                    let text = details(&now, before.as_ref(), options);
                    before = Some(now);
                    text
                }
                // It answered before, and may do so again: it may be stopped.
                (Err(error), Some(_)) if is_alive(pid) => remark(&error.to_string(), options),
                (Err(_), Some(_)) => {
                    // Which is not an error of --watch.
                    print(&remark(&format!("process {pid} has ended"), options))?;
                    return Ok(());
                }
                (Err(error), None) => return Err(error),
            },
        };
        let clear = options.watch.is_some() && !options.json && io::stdout().is_terminal();
        // Names are what other processes say: they do not control this user's terminal.
        let text = if options.json {
            text
        } else {
            text.replace(|letter: char| letter.is_control() && letter != '\n', "?")
        };
        let is_read = print(&format!("{}{text}", if clear { "\x1b[H\x1b[2J" } else { "" }))?;
        match options.watch {
            Some(seconds) if is_read => std::thread::sleep(Duration::from_secs(seconds)),
            _ => return Ok(()),
        }
    }
}

/// What a process has answered, and when.
struct Sample {
    devices: Vec<DeviceSnapshot>,
    at: Instant,
}

/// A line between the counters: none of a JSON document, so it goes to standard error then.
fn remark(line: &str, options: &Options) -> String {
    if options.json {
        complain(line);
        return String::new();
    }
    format!("{line}\n")
}

/// Whether the process is there, and no zombie.
fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which may have brackets of its own.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn snapshots(pid: u32) -> Result<Vec<DeviceSnapshot>, StatError> {
    match fetch(pid) {
        Ok(devices) if devices.is_empty() => Err(StatError::NoDevice(pid)),
        Ok(devices) => Ok(devices),
        Err(error) => Err(StatError::NoAnswer(pid, error)),
    }
}

// ---- all processes -----------------------------------------------------------------------------------------------------

fn list(as_json: bool) -> Result<String, StatError> {
    let pids = processes().map_err(StatError::List)?;
    // A process may end between the listing and the query, which is not an error. One of another user gets a line, too.
    let answers = fetch_all(&pids);
    if as_json {
        let devices: Vec<_> = answers.into_iter().filter_map(|(_, answer)| answer.ok()).flatten().collect();
        return Ok(json::list("devices", &devices));
    }
    let rows: Vec<Vec<String>> =
        answers.iter().flat_map(|(pid, answer)| process_rows(*pid, answer)).collect();
    if rows.is_empty() {
        return Ok("no process runs with Terrace\n".into());
    }
    Ok(table::render(
        &["pid", "program", "address", "UDP port", "queue pairs", "tx packets", "rx packets"],
        &rows,
    ))
}

fn process_rows(pid: u32, answer: &io::Result<Vec<DeviceSnapshot>>) -> Vec<Vec<String>> {
    let program = program_name(pid);
    match answer {
        Ok(devices) => devices
            .iter()
            .map(|device| {
                vec![
                    pid.to_string(),
                    program.clone(),
                    device.addresses.first().cloned().unwrap_or_default(),
                    device.udp_port.to_string(),
                    device.queue_pairs.len().to_string(),
                    count(&device.port, "tx_packets").to_string(),
                    count(&device.port, "rx_packets").to_string(),
                ]
            })
            .collect(),
        Err(error) => {
            let mut row = vec![pid.to_string(), program, format!("({error})")];
            row.resize(7, String::new());
            vec![row]
        }
    }
}

/// The name of a process's program; of `terrace`, the command too.
pub fn program_name(pid: u32) -> String {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}"));
    match read("comm") {
        Err(_) => "?".into(),
        Ok(name) => with_command(name.trim_end(), &read("cmdline").unwrap_or_default()),
    }
}

/// `terrace serve`, `terrace pager`: a command without options stands behind the program's name.
fn with_command(name: &str, command_line: &str) -> String {
    let is_command = |word: &&str| {
        !word.is_empty() && word.chars().all(|letter| letter.is_ascii_lowercase() || letter == '-')
    };
    match command_line.split('\0').nth(1).filter(is_command) {
        Some(command) if name == "terrace" => format!("terrace {command}"),
        _ => name.into(),
    }
}

fn count(counts: &Counts, name: &str) -> u64 {
    counts.get(name).copied().unwrap_or(0)
}

// ---- one process -------------------------------------------------------------------------------------------------------

fn details(now: &Sample, before: Option<&Sample>, options: &Options) -> String {
    if options.json {
        let document = if options.watch.is_none() { json::list } else { json::list_line };
        return document("devices", &now.devices);
    }
    // A process that is busy may have answered late, or not at all, since.
    let seconds = before.map_or(0.0, |before| (now.at - before.at).as_secs_f64());
    let earlier = |index: usize| before.and_then(|before| before.devices.get(index));
    let blocks =
        now.devices.iter().enumerate().map(|(index, device)| device_text(device, earlier(index), seconds));
    blocks.collect::<Vec<_>>().join("\n")
}

fn device_text(device: &DeviceSnapshot, before: Option<&DeviceSnapshot>, seconds: f64) -> String {
    let mut text = format!(
        "process {} ({}): {}, UDP port {}, path MTU {}\n",
        device.pid,
        program_name(device.pid),
        device.addresses.join(", "),
        device.udp_port,
        device.mtu_bytes
    );
    text += &section("port", &device.port, before.map(|device| &device.port), seconds);
    text += &section("dropped", &device.dropped, before.map(|device| &device.dropped), seconds);
    if device.passed_on > 0 {
        text += &format!("forwarded to other processes of this address: {} packets\n", device.passed_on);
    }
    if !device.same_host.is_empty() {
        let before = before.map(|device| &device.same_host);
        text += &section("to peers on the same host, by shared memory", &device.same_host, before, seconds);
    }
    text += &section("objects", &device.objects, None, seconds);
    if !device.injected.is_empty() {
        text += &section(
            "injected by the fault plan",
            &device.injected,
            before.map(|device| &device.injected),
            seconds,
        );
    }
    if let Some(now) = memory(device) {
        text += &regions::text(&now, before.and_then(memory).as_ref(), seconds);
    }
    if let Some(now) = np(device) {
        text += &section("NP-RDMA", &now, before.and_then(np).as_ref(), seconds);
    }
    if let Some(now) = files(device) {
        text += &section("files", &now, before.and_then(files).as_ref(), seconds);
    }
    if let Some(now) = export(device) {
        text += &exports::text(&now, before.and_then(export).as_ref(), seconds);
    }
    let clients = clients(device);
    if !clients.is_empty() {
        text += &clients::text(&clients, &before.map(self::clients).unwrap_or_default(), seconds);
    }
    if let Some(status) = memory_node(device) {
        text += &pool::text(&status);
    }
    if let Some(now) = pager(device) {
        let before = before.and_then(pager);
        text += &far_pages::text(&now);
        let counts = far_pages::counts(&now);
        text += &section("pager", &counts, before.map(|before| far_pages::counts(&before)).as_ref(), seconds);
    }
    if let Some(now) = swap_device(device) {
        let before = before.and_then(swap_device).map(|before| swap_pages::counts(&before));
        text += &section("swap device", &swap_pages::counts(&now), before.as_ref(), seconds);
    }
    let nodes = memory_nodes(device);
    if !nodes.is_empty() {
        text += &node_states::text(&nodes);
    }
    if !device.queue_pairs.is_empty() {
        text += "\n";
        text += &queue_pair_table(&device.queue_pairs);
    }
    text
}

/// The state of the process's regions larger than memory, if it has any.
pub fn memory(device: &DeviceSnapshot) -> Option<MemoryStats> {
    device.reports.get("memory").and_then(|report| MemoryStats::deserialize(report).ok())
}

/// The counters of NP-RDMA, if the device knows nothing of absent memory.
fn np(device: &DeviceSnapshot) -> Option<Counts> {
    device.reports.get("np").and_then(|report| Counts::deserialize(report).ok())
}

/// The counters of the process's regions that are files, if it has had any.
fn files(device: &DeviceSnapshot) -> Option<Counts> {
    device.reports.get("files").and_then(|report| Counts::deserialize(report).ok())
}

/// The state of an export.
fn export(device: &DeviceSnapshot) -> Option<ExportStats> {
    device.reports.get("export").and_then(|report| ExportStats::deserialize(report).ok())
}

/// The clients of the process's regions.
fn clients(device: &DeviceSnapshot) -> Vec<ClientStats> {
    let report = device.reports.get("clients");
    report.and_then(|report| Vec::deserialize(report).ok()).unwrap_or_default()
}

/// The state of a pager of programs whose memory is on memory nodes.
fn pager(device: &DeviceSnapshot) -> Option<PagerStatus> {
    device.reports.get(terrace_pager::REPORT).and_then(|report| PagerStatus::deserialize(report).ok())
}

/// The counters of a swap device.
fn swap_device(device: &DeviceSnapshot) -> Option<Totals> {
    device.reports.get(terrace_nbd::REPORT).and_then(|report| Totals::deserialize(report).ok())
}

/// The memory nodes that the process uses.
fn memory_nodes(device: &DeviceSnapshot) -> Vec<NodeState> {
    let report = device.reports.get(NODES_REPORT);
    report.and_then(|report| Vec::deserialize(report).ok()).unwrap_or_default()
}

/// The pages of a memory node, and who has them.
fn memory_node(device: &DeviceSnapshot) -> Option<NodeStatus> {
    device.reports.get("memory_node").and_then(|report| NodeStatus::deserialize(report).ok())
}

/// How much a counter has grown in a second since it was `then`, `seconds` ago.
pub fn rate(now: u64, then: u64, seconds: f64) -> u64 {
    (now.saturating_sub(then) as f64 / seconds) as u64
}

/// Counters below a title. With rates if `before`, of `seconds` ago, is given.
pub fn section(title: &str, counts: &Counts, before: Option<&Counts>, seconds: f64) -> String {
    let mut text = format!("\n{title}\n");
    for (name, value) in counts {
        text += &format!("  {name:<22} {value:>15}");
        if let Some(before) = before {
            text += &format!(" {:>13}/s", rate(*value, count(before, name), seconds));
        }
        text.push('\n');
    }
    text
}

/// One line for each queue pair. Counters that are zero for all queue pairs get no column.
fn queue_pair_table(pairs: &[QpSnapshot]) -> String {
    let counted: Vec<&String> = pairs
        .iter()
        .flat_map(|pair| pair.counts.iter().filter(|(_, value)| **value != 0).map(|(name, _)| name))
        .collect::<std::collections::BTreeSet<_>>()
        .into_iter()
        .collect();
    let mut header = vec!["qpn", "type", "state", "peer", "peer qpn", "sends", "receives"];
    header.extend(counted.iter().map(|name| name.as_str()));
    let rows: Vec<Vec<String>> = pairs
        .iter()
        .map(|pair| {
            let mut row = vec![
                format!("{:#08x}", pair.qpn),
                pair.kind.clone(),
                pair.state.clone(),
                pair.remote.clone().unwrap_or_else(|| "-".into()),
                pair.remote.as_ref().map_or_else(|| "-".into(), |_| format!("{:#08x}", pair.remote_qpn)),
                pair.send_queue_len.to_string(),
                pair.receive_queue_len.to_string(),
            ];
            row.extend(counted.iter().map(|name| count(&pair.counts, name).to_string()));
            row
        })
        .collect();
    table::render(&header, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(pairs: &[(&str, u64)]) -> Counts {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn rates_are_shown_only_with_an_earlier_sample() {
        let now = counts(&[("tx_packets", 300)]);
        assert!(!section("port", &now, None, 2.0).contains("/s"));
        assert!(section("port", &now, Some(&counts(&[("tx_packets", 100)])), 2.0).contains(" 100/s"));
    }

    #[test]
    fn rates_are_of_the_time_between_the_answers() {
        let sample = |tx_packets, at| {
            let port = counts(&[("tx_packets", tx_packets)]);
            Sample { devices: vec![DeviceSnapshot { port, ..DeviceSnapshot::default() }], at }
        };
        let (begin, options) = (Instant::now(), Options { pid: None, json: false, watch: Some(1) });
        let text = details(&sample(500, begin + Duration::from_secs(4)), Some(&sample(100, begin)), &options);
        assert!(text.contains(" 100/s"), "{text}");
    }

    #[test]
    fn servers_have_the_name_of_their_command() {
        assert_eq!(
            with_command("terrace", "/usr/bin/terrace\0memory-node\0--memory\08G\0"),
            "terrace memory-node"
        );
        assert_eq!(with_command("terrace", "terrace\0"), "terrace");
        assert_eq!(with_command("terrace", "terrace\0\x1b[2J\0"), "terrace");
        assert_eq!(with_command("ib_write_bw", "ib_write_bw\0server\0"), "ib_write_bw");
    }

    #[test]
    fn only_nonzero_counters_get_a_column() {
        let pair = QpSnapshot {
            qpn: 0x11,
            kind: "RC".into(),
            state: "RTS".into(),
            counts: counts(&[("timeouts", 0), ("tx_packets", 5)]),
            ..QpSnapshot::default()
        };
        let text = queue_pair_table(&[pair]);
        assert!(text.contains("tx_packets") && !text.contains("timeouts"), "{text}");
        assert!(text.contains("0x000011  RC"), "{text}");
    }

    #[test]
    fn a_process_that_does_not_answer_has_a_line() {
        let rows = process_rows(1, &Err(io::ErrorKind::PermissionDenied.into()));
        assert_eq!((rows.len(), rows[0].len()), (1, 7));
    }
}
