//! Statistics: the counters that `terrace stat` shows.
//!
//! Every device listens on a socket in the abstract name space, `terrace/<pid>` or, for further devices of the same
//! process, `terrace/<pid>/<n>`, and answers a connection with its snapshot as JSON.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::{Deserialize, Serialize};
use terrace_faults::Faults;
use terrace_transport::QpCounters;

use crate::device::Device;
use crate::qp::QueuePair;

/// Named counters.
pub type Counts = BTreeMap<String, u64>;

/// A snapshot of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSnapshot {
    /// The process.
    pub pid: u32,
    /// The process's instance index on its host.
    pub slot: u8,
    /// The UDP port that belongs to the instance.
    pub udp_port: u16,
    /// Addresses in the order of the GID table.
    pub addresses: Vec<String>,
    /// Largest path MTU in bytes.
    pub mtu_bytes: u32,
    /// Packets and bytes through the port.
    pub port: Counts,
    /// Packets that were dropped before a queue pair saw them.
    pub dropped: Counts,
    /// Packets that arrived at the standard port and were forwarded to other processes of the address.
    #[serde(default)]
    pub passed_on: u64,
    /// Same-host peers that are reached without the network, and packets by rings in memory; empty if that is off.
    #[serde(default, skip_serializing_if = "Counts::is_empty")]
    pub same_host: Counts,
    /// How many objects of each kind exist.
    pub objects: Counts,
    /// Faults that the fault plan has injected; empty without one.
    #[serde(default, skip_serializing_if = "Counts::is_empty")]
    pub injected: Counts,
    /// The queue pairs, in the order of their numbers.
    pub queue_pairs: Vec<QpSnapshot>,
    /// The reports of the device's callbacks, by their names.
    #[serde(flatten)]
    pub reports: BTreeMap<String, serde_json::Value>,
}

/// A snapshot of a queue pair.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpSnapshot {
    /// Its number.
    pub qpn: u32,
    /// RC, UC or UD.
    pub kind: String,
    /// Its state.
    pub state: String,
    /// The peer's address, when connected.
    pub remote: Option<String>,
    /// The peer's number, when connected.
    pub remote_qpn: u32,
    /// The PSN of the next packet that it sends.
    #[serde(default)]
    pub sq_psn: u32,
    /// Send work requests that are not complete.
    pub send_queue_len: usize,
    /// Receive work requests that are not complete, of its own queue.
    pub receive_queue_len: usize,
    /// Its counters.
    pub counts: Counts,
}

impl Device {
    /// The device's counters now.
    pub fn snapshot(&self) -> DeviceSnapshot {
        let port = serde_json::to_value(self.port.counters().snapshot());
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DeviceSnapshot {
            pid: std::process::id(),
            slot: self.port.instance(),
            udp_port: self.port.udp_port(),
            addresses: self.gids().iter().map(|gid| gid.addr.to_string()).collect(),
            mtu_bytes: self.port.mtu_limit(),
            port: port.and_then(serde_json::from_value).unwrap_or_default(),
            dropped: named([
                ("malformed", read(&self.counters.malformed)),
                ("unknown_qp", read(&self.counters.unknown_qp)),
                ("unknown_group", read(&self.counters.unknown_group)),
                ("wrong_partition", read(&self.counters.wrong_partition)),
                ("management", read(&self.management.dropped)),
            ]),
            passed_on: read(&self.counters.forwarded),
            same_host: named(self.local.counts()),
            objects: named([
                ("protection_domains", self.quotas.pd.used().into()),
                ("memory_regions", self.quotas.mr.used().into()),
                ("memory_windows", self.quotas.mw.used().into()),
                ("completion_queues", self.quotas.cq.used().into()),
                ("shared_receive_queues", self.quotas.srq.used().into()),
                ("address_handles", self.quotas.ah.used().into()),
                ("queue_pairs", self.quotas.qp.used().into()),
                ("multicast_attachments", self.multicast.attached_count() as u64),
            ]),
            injected: self.faults.as_ref().map(|faults| injected(faults)).unwrap_or_default(),
            queue_pairs: self.table.all().iter().map(|qp| qp.snapshot()).collect(),
            reports: self.reports(),
        }
    }
}

impl Device {
    fn reports(&self) -> BTreeMap<String, serde_json::Value> {
        let mut reports: BTreeMap<_, _> =
            self.callbacks.all().iter().filter_map(|callback| callback.report()).collect();
        reports.extend(self.report.get().and_then(|report| report()));
        reports
    }
}

impl QueuePair {
    fn snapshot(&self) -> QpSnapshot {
        let core = self.lock();
        let attr = core.qp.query();
        let (send_queue_len, receive_queue_len) = core.qp.queue_lengths();
        QpSnapshot {
            qpn: self.qpn(),
            kind: format!("{:?}", self.qp_type()).to_uppercase(),
            state: format!("{:?}", attr.state).to_uppercase(),
            remote: attr.path.map(|path| path.remote.to_string()),
            remote_qpn: attr.dest_qpn,
            sq_psn: attr.sq_psn,
            send_queue_len,
            receive_queue_len,
            counts: qp_counts(&self.counters_with(&core)),
        }
    }
}

fn qp_counts(counters: &QpCounters) -> Counts {
    named([
        ("tx_packets", counters.tx_packets),
        ("tx_bytes", counters.tx_bytes),
        ("rx_packets", counters.rx_packets),
        ("rx_bytes", counters.rx_bytes),
        ("retransmits", counters.retransmits),
        ("timeouts", counters.timeouts),
        ("rnr_naks_sent", counters.rnr_naks_sent),
        ("rnr_naks_received", counters.rnr_naks_received),
        ("sequence_naks_sent", counters.sequence_naks_sent),
        ("sequence_naks_received", counters.sequence_naks_received),
        ("error_naks_sent", counters.error_naks_sent),
        ("error_naks_received", counters.error_naks_received),
        ("duplicates", counters.duplicates),
        ("dropped", counters.dropped),
        ("requests", counters.requests),
        ("fetches", counters.fetches),
        ("puts", counters.puts),
        ("cnps_received", counters.cnps_received),
        ("cnps_sent", counters.cnps_sent),
        ("direct", counters.direct),
        ("direct_bytes", counters.direct_bytes),
        ("runs_sent", counters.runs_sent),
        ("runs_received", counters.runs_received),
    ])
}

fn injected(faults: &Faults) -> Counts {
    faults.counts().named().map(|(name, count)| (name.to_owned(), count)).collect()
}

fn named<'a>(counts: impl IntoIterator<Item = (&'a str, u64)>) -> Counts {
    counts.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}

/// Most devices of one process that get a status socket.
const SOCKETS_MAX: u32 = 256;

/// How long [`fetch`] waits for a process that does not answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest answer, in time and in bytes: any user can listen at such a name. A device with 60,000 queue pairs has 60 MiB.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);
const ANSWER_BYTES_MAX: usize = 256 << 20;

fn socket_name(pid: u32, number: u32) -> String {
    if number == 0 { format!("terrace/{pid}") } else { format!("terrace/{pid}/{number}") }
}

/// Takes the first of this process's names that is free.
pub(crate) fn listen() -> io::Result<UnixListener> {
    let pid = std::process::id();
    let mut result = Err(io::ErrorKind::AddrInUse.into());
    for number in 0..SOCKETS_MAX {
        let addr = SocketAddr::from_abstract_name(socket_name(pid, number))?;
        result = UnixListener::bind_addr(&addr);
        if !matches!(&result, Err(error) if error.kind() == io::ErrorKind::AddrInUse) {
            break;
        }
    }
    let listener = result?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Tries with a device that accepts the connection and sends nothing.
const ASKED_MAX: u32 = 3;
/// Tries with a device that is gone, although the kernel's list has its socket. Where devices are opened and closed all
/// the time, successive devices may have the same number.
const LOOKED_FOR_MAX: u32 = 32;

/// Asks every device of a running process for its counters; a device that is closed meanwhile is skipped. An empty
/// answer means that the process has no device.
///
/// # Errors
/// When the process does not answer in time, or belongs to another user.
pub fn fetch(pid: u32) -> io::Result<Vec<DeviceSnapshot>> {
    let mut snapshots = Vec::new();
    for number in open_sockets(pid)? {
        snapshots.extend(fetch_one(pid, number)?);
    }
    Ok(snapshots)
}

/// `None` if the device is closed meanwhile.
fn fetch_one(pid: u32, number: u32) -> io::Result<Option<DeviceSnapshot>> {
    let (mut silent, mut missing) = (0, 0);
    while silent < ASKED_MAX {
        let answer = ask(pid, number);
        match &answer {
            Ok(text) if !text.is_empty() => return Ok(Some(serde_json::from_slice(text)?)),
            // The device is there, and takes too long.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let why = format!("no answer within {} s: it may be stopped", ANSWER_TIMEOUT.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return answer.map(|_| None),
            // A device that did not answer may have been closed, and another may have its number by now.
            _ if !open_sockets(pid)?.contains(&number) => return Ok(None),
            Ok(_) => silent += 1,
            Err(_) if missing == LOOKED_FOR_MAX => return answer.map(|_| None),
            Err(_) => missing += 1,
        }
    }
    let why = "the process answers only its own user and root";
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// A device's answer, empty if it sends none.
fn ask(pid: u32, number: u32) -> io::Result<Vec<u8>> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The timeout covers a process that accepts no connections, too: once its backlog is full, `connect` blocks.
    set_socket_timeout(&socket, Timeout::Send, Some(ANSWER_TIMEOUT))?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(socket_name(pid, number).as_bytes())?)?;
    let mut stream = UnixStream::from(socket);
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let (mut text, mut chunk) = (Vec::new(), vec![0; 64 << 10]);
    let deadline = Instant::now() + ANSWER_TIME_MAX;
    while text.len() <= ANSWER_BYTES_MAX && Instant::now() < deadline {
        match stream.read(&mut chunk) {
            Ok(0) => return Ok(text),
            Ok(count) => text.extend_from_slice(&chunk[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "its answer does not end"))
}

/// Processes that have a device, in the order of their numbers.
///
/// # Errors
/// When the kernel's list of sockets cannot be read.
pub fn processes() -> io::Result<Vec<u32>> {
    let mut pids: Vec<u32> = socket_suffixes("terrace/")?
        .iter()
        .filter_map(|suffix| suffix.split('/').next()?.parse().ok())
        .collect();
    pids.sort_unstable();
    pids.dedup();
    Ok(pids)
}

/// Numbers of the sockets that exist for a process.
fn open_sockets(pid: u32) -> io::Result<Vec<u32>> {
    let mut numbers: Vec<u32> = socket_suffixes(&socket_name(pid, 0))?
        .iter()
        .filter_map(|suffix| match suffix.strip_prefix('/') {
            Some(number) => number.parse().ok(),
            None => suffix.is_empty().then_some(0),
        })
        .collect();
    numbers.retain(|number| *number < SOCKETS_MAX);
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers)
}

/// What follows `prefix` in the names of the abstract sockets that have it, from the kernel's list.
fn socket_suffixes(prefix: &str) -> io::Result<Vec<String>> {
    // Names of other programs are any bytes.
    let list = String::from_utf8_lossy(&std::fs::read("/proc/net/unix")?).into_owned();
    let prefix = format!("@{prefix}");
    let names = list.lines().filter_map(|line| line.split_whitespace().last());
    Ok(names.filter_map(|name| name.strip_prefix(&prefix)).map(str::to_owned).collect())
}
