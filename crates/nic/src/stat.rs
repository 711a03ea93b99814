//! Statistics: the counters that `terrace stat` shows.
//!
//! Every device listens on a socket in the abstract name space, `terrace/<pid>` or, for further devices of the same
//! process, `terrace/<pid>/<n>`, and answers a connection with its snapshot as JSON.

mod fetch;

use std::collections::BTreeMap;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::atomic::{AtomicU64, Ordering};

pub use fetch::{fetch, fetch_all, processes};
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
