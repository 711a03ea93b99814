//! A capture of a port's packets, for Wireshark: IP packets (LINKTYPE_RAW) whose IP and UDP headers are rebuilt from
//! the port's data. Their RoCEv2 part, ICRC included, is as on the wire.

mod pipe;

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path as FilePath, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use terrace_sync::{Mutex, Uncancelled};
use terrace_wire::icrc::{self, Flow, Verdict};
use terrace_wire::{ICRC_LEN, Path};

use crate::corrupt::corrupt;
use crate::pcap::pipe::PipeWriter;
pub use crate::pcap::pipe::end_pipes;
use crate::{Gid, Port, PortCounters, RxBatch, TxBatch};

/// The file's first bytes: times in nanoseconds, version 2.4, packets up to 256 KiB, link type 101 (raw IP).
const FILE_HEADER: [u32; 6] = [0xa1b2_3c4d, 2 | 4 << 16, 0, 0, 1 << 18, 101];

const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
const UDP_LEN: usize = 8;
const UDP_PROTOCOL: u8 = 17;

/// The time to live in rebuilt headers, where the kernel chooses it or does not report it.
const HOP_LIMIT: u8 = 64;

/// A port whose packets, in both directions, are also written to a file. Inside a
/// [`FaultyPort`](crate::fault::FaultyPort) it records the packets after the faults.
///
/// When the file can no longer be written, for example on a full disk, the capture ends with one line in the log. The
/// port continues to send and receive packets. It does not wait for the reader of a pipe: packets that the reader does
/// not take in time are left out.
#[derive(Debug)]
pub struct PcapPort<P: Port = Box<dyn Port>> {
    inner: P,
    path: PathBuf,
    capture: Mutex<Capture>,
}

#[derive(Debug)]
enum Output {
    File { file: File, len: u64 },
    Pipe(PipeWriter),
}

#[derive(Debug)]
struct Capture {
    /// `None` after a write has failed.
    output: Option<Output>,
    /// Records of the current burst, back to back.
    records: Vec<u8>,
    /// End of each record.
    record_ends: Vec<usize>,
}

/// Opens a capture file for exclusive use by one port, and truncates it. A new file is readable only by its owner,
/// because it contains the data of all packets. Two ports, of one process or of several, cannot write to one file: the
/// first port has it locked until it is closed.
///
/// # Errors
/// The file cannot be opened for writing; `WouldBlock` if another port has locked it; `NotConnected` for a pipe without a
/// reader.
pub fn open_exclusive(path: &FilePath) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    // Opening a pipe would wait for its reader, and so would writing to it.
    let file = options.custom_flags(OFlags::NONBLOCK.bits() as i32).open(path).map_err(|error| {
        match Errno::from_io_error(&error) {
            Some(Errno::NXIO) => io::Error::new(ErrorKind::NotConnected, "no program reads from this pipe"),
            _ => error,
        }
    })?;
    file.try_lock()?;
    // A pipe to a running Wireshark cannot be emptied.
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
}

impl<P: Port> PcapPort<P> {
    /// Wraps a port and starts a new file, replacing the old one.
    ///
    /// # Errors
    /// The file cannot be created or written; `WouldBlock` if another port has locked it.
    pub fn create(inner: P, path: &FilePath) -> io::Result<PcapPort<P>> {
        PcapPort::new(inner, open_exclusive(path)?, path)
    }

    /// Wraps a port and writes to a file that [`open_exclusive`] opened. `path` is used only in log messages.
    ///
    /// # Errors
    /// The file cannot be written, or the thread that writes to a pipe cannot be started.
    pub fn new(inner: P, file: File, path: &FilePath) -> io::Result<PcapPort<P>> {
        let header: Vec<u8> = FILE_HEADER.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut output = if file.metadata()?.is_file() {
            Output::File { file, len: 0 }
        } else {
            Output::Pipe(PipeWriter::start(file, path)?)
        };
        output.write(&header)?;
        let capture = Capture { output: Some(output), records: Vec::new(), record_ends: Vec::new() };
        Ok(PcapPort { inner, path: path.to_owned(), capture: Mutex::new(capture) })
    }

    /// The flow of a packet sent on this path.
    fn flow(&self, path: &Path) -> Option<Flow> {
        let gid = self.inner.gids().get(usize::from(path.source_gid_index))?;
        Some(Flow { source: SocketAddr::new(gid.addr, self.inner.udp_port()), destination: path.remote })
    }

    /// Records every queued packet, sealed as it will be sent.
    fn record_queued(&self, capture: &mut Capture, tx: &TxBatch, at: Duration) {
        for (run, index, bytes) in tx.packets_of_runs() {
            if let Some(flow) = self.flow(&run.path) {
                let sealed_len = bytes.len() + ICRC_LEN;
                let class = run.path.traffic_class;
                let packet = capture.push_record(at, &flow, class, index, sealed_len);
                packet[..bytes.len()].copy_from_slice(bytes);
                icrc::seal(&flow, packet, index);
                if let Some(bit) = run.corrupt_bit {
                    corrupt(&flow, packet, bit);
                }
            }
            capture.record_ends.push(capture.records.len());
        }
    }
}

impl Capture {
    fn begin(&mut self) {
        self.records.clear();
        self.record_ends.clear();
    }

    /// Adds a record with its headers and returns the buffer for the packet, BTH to ICRC.
    fn push_record(
        &mut self,
        at: Duration,
        flow: &Flow,
        class: u8,
        ip_id: u16,
        sealed_len: usize,
    ) -> &mut [u8] {
        let (headers, headers_len) = ip_and_udp(flow, class, ip_id, sealed_len);
        let frame_len = (headers_len + sealed_len) as u32;
        let record_header = [at.as_secs() as u32, at.subsec_nanos(), frame_len, frame_len];
        self.records.extend(record_header.iter().flat_map(|word| word.to_ne_bytes()));
        self.records.extend_from_slice(&headers[..headers_len]);
        let start = self.records.len();
        self.records.resize(start + sealed_len, 0);
        &mut self.records[start..]
    }

    fn record_received(&mut self, rx: &RxBatch, at: Duration) {
        for (datagram, sealed, likely_ip_id) in rx.unchecked() {
            let flow = datagram.flow();
            // The rebuilt header has the packet's identification, so that Wireshark finds a correct ICRC correct.
            let ip_id = match icrc::verify(&flow, sealed, likely_ip_id) {
                Verdict::Good { ip_id } => ip_id,
                Verdict::Bad => likely_ip_id,
            };
            let class = datagram.meta.traffic_class;
            self.push_record(at, &flow, class, ip_id, sealed.len()).copy_from_slice(sealed);
        }
        self.record_ends.push(self.records.len());
    }

    /// Writes the first `count` records. Those for a file are written immediately, so that a killed program leaves a complete
    /// capture.
    fn write(&mut self, count: usize, path: &FilePath) {
        let Some(end) = count.checked_sub(1).and_then(|last| self.record_ends.get(last)) else { return };
        let Some(output) = &mut self.output else { return };
        let _uncancelled = Uncancelled::new();
        if let Err(error) = output.write(&self.records[..*end]) {
            // The writer to a pipe has written its line.
            if let Output::File { .. } = output {
                tracing::warn!(
                    "the capture to {} ends: {error}; the port continues without it",
                    path.display()
                );
            }
            self.output = None;
        }
    }
}

impl Output {
    fn write(&mut self, records: &[u8]) -> io::Result<()> {
        match self {
            Output::File { file, len } => {
                let end = *len + records.len() as u64;
                // Beyond the limit the write would end the process by SIGXFSZ.
                let is_too_long = getrlimit(Resource::Fsize).current.is_some_and(|limit| end > limit);
                let written = if is_too_long { Err(Errno::FBIG.into()) } else { file.write_all(records) };
                match written {
                    Ok(()) => *len = end,
                    // Readers reject a file with an incomplete record.
                    Err(_) => _ = file.set_len(*len),
                }
                written
            }
            Output::Pipe(writer) if writer.write(records) => Ok(()),
            Output::Pipe(_) => Err(Errno::PIPE.into()),
        }
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// IP and UDP headers and their length, for a packet of `sealed_len` bytes with its ICRC.
fn ip_and_udp(flow: &Flow, class: u8, ip_id: u16, sealed_len: usize) -> ([u8; IPV6_LEN + UDP_LEN], usize) {
    let mut headers = [0; IPV6_LEN + UDP_LEN];
    let udp_len = (UDP_LEN + sealed_len) as u16;
    let ip_len = match (flow.source.ip().to_canonical(), flow.destination.ip().to_canonical()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            ipv4(&mut headers, [source, destination], class, ip_id, udp_len);
            IPV4_LEN
        }
        (source, destination) => {
            ipv6(&mut headers, [mapped(source), mapped(destination)], class, udp_len);
            IPV6_LEN
        }
    };
    // A checksum of 0 means that there is none.
    let udp = [flow.source.port(), flow.destination.port(), udp_len, 0];
    for (field, value) in headers[ip_len..].chunks_exact_mut(2).zip(udp) {
        field.copy_from_slice(&value.to_be_bytes());
    }
    (headers, ip_len + UDP_LEN)
}

fn ipv4(header: &mut [u8], ends: [Ipv4Addr; 2], class: u8, ip_id: u16, udp_len: u16) {
    header[0] = 0x45;
    header[1] = class;
    header[2..4].copy_from_slice(&(IPV4_LEN as u16).wrapping_add(udp_len).to_be_bytes());
    header[4..6].copy_from_slice(&ip_id.to_be_bytes());
    header[6] = 0x40; // Do not fragment.
    header[8] = HOP_LIMIT;
    header[9] = UDP_PROTOCOL;
    header[12..16].copy_from_slice(&ends[0].octets());
    header[16..20].copy_from_slice(&ends[1].octets());
    let words = header[..IPV4_LEN].chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
    let sum: u32 = words.map(u32::from).sum();
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
}

fn ipv6(header: &mut [u8], ends: [Ipv6Addr; 2], class: u8, udp_len: u16) {
    header[..4].copy_from_slice(&(6 << 28 | u32::from(class) << 20).to_be_bytes());
    header[4..6].copy_from_slice(&udp_len.to_be_bytes());
    header[6] = UDP_PROTOCOL;
    header[7] = HOP_LIMIT;
    header[8..24].copy_from_slice(&ends[0].octets());
    header[24..40].copy_from_slice(&ends[1].octets());
}

fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

impl<P: Port> Port for PcapPort<P> {
    fn gids(&self) -> &[Gid] {
        self.inner.gids()
    }

    fn instance(&self) -> u8 {
        self.inner.instance()
    }

    fn udp_port(&self) -> u16 {
        self.inner.udp_port()
    }

    fn mtu_limit(&self) -> u32 {
        self.inner.mtu_limit()
    }

    fn receive_buffer_bytes(&self) -> usize {
        self.inner.receive_buffer_bytes()
    }

    fn counters(&self) -> &PortCounters {
        self.inner.counters()
    }

    /// The lock is held during the send, so that a response cannot precede its request in the file.
    fn transmit(&self, tx: &mut TxBatch) -> bool {
        let mut capture = self.capture.lock();
        if capture.output.is_none() {
            drop(capture);
            return self.inner.transmit(tx);
        }
        capture.begin();
        self.record_queued(&mut capture, tx, now());
        let waiting = tx.len();
        let all_sent = self.inner.transmit(tx);
        capture.write(waiting - tx.len(), &self.path);
        all_sent
    }

    fn receive(&self, rx: &mut RxBatch) -> usize {
        let received = self.inner.receive(rx);
        if received > 0 {
            let mut capture = self.capture.lock();
            if capture.output.is_some() {
                capture.begin();
                capture.record_received(rx, now());
                capture.write(1, &self.path);
            }
        }
        received
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.inner.descriptors()
    }

    fn sending_descriptor(&self, gid_index: u8) -> Option<BorrowedFd<'_>> {
        self.inner.sending_descriptor(gid_index)
    }

    fn activate(&self, gid_index: u8) {
        self.inner.activate(gid_index);
    }

    fn join(&self, group: IpAddr) -> io::Result<()> {
        self.inner.join(group)
    }

    fn leave(&self, group: IpAddr) {
        self.inner.leave(group);
    }
}
