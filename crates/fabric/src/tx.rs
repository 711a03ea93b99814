//! Packets to send.

use terrace_wire::{ICRC_LEN, Path};

/// Most packets in one GSO send: the limit of the oldest kernels with GSO (`UDP_MAX_SEGMENTS`).
pub(crate) const RUN_PACKETS_MAX: usize = 64;

/// Most bytes in one GSO send: the largest UDP payload of IPv4.
pub(crate) const RUN_BYTES_MAX: usize = 65_507;

/// The smallest batch, which fits one packet of the largest path MTU with every header.
const CAPACITY_BYTES_MIN: usize = 8192;

/// Packets to send, back to back in one buffer, each with space for its ICRC behind it.
///
/// Consecutive packets with the same path and length form a run, whose last packet may be shorter. One GSO send sends a
/// run without another copy. [`Port::transmit`](crate::Port::transmit) drains the batch.
#[derive(Debug)]
pub struct TxBatch {
    buffer: Box<[u8]>,
    /// End of the used part of the buffer. Space is released only when all packets were sent.
    end: usize,
    /// Runs in order; those before `first_run` were sent.
    runs: Vec<Run>,
    first_run: usize,
    packets: usize,
}

/// Packets that are sent together. Lengths include the ICRC.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub path: Path,
    pub start: usize,
    /// Length of every packet but the last.
    pub segment: usize,
    /// Length of the last packet, at most `segment`.
    pub last: usize,
    pub count: usize,
    /// Fault injection: the bit to flip after the ICRC was computed. Such a run has one packet.
    pub corrupt_bit: Option<u32>,
}

impl Run {
    pub fn len(&self) -> usize {
        self.segment * (self.count - 1) + self.last
    }

    fn accepts(&self, path: &Path, len: usize) -> bool {
        self.last == self.segment
            && len <= self.segment
            && self.count < RUN_PACKETS_MAX
            && self.len() + len <= RUN_BYTES_MAX
            && self.corrupt_bit.is_none()
            && self.path == *path
    }
}

/// A packet queued in a [`TxBatch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxPacket<'a> {
    /// The packet's path.
    pub path: Path,
    /// The bytes from the BTH to the end of the padding.
    pub bytes: &'a [u8],
}

impl TxBatch {
    /// An empty batch for `capacity_bytes` of packets including their ICRCs, or for one packet of the largest size if
    /// that is more.
    pub fn new(capacity_bytes: usize) -> TxBatch {
        TxBatch {
            buffer: vec![0; capacity_bytes.max(CAPACITY_BYTES_MIN)].into(),
            end: 0,
            runs: Vec::with_capacity(64),
            first_run: 0,
            packets: 0,
        }
    }

    /// Adds a packet of `len` bytes from the BTH to the end of the padding, and returns its buffer, or `None` if the
    /// batch is full: transmit, then try again. The content is unspecified; the caller writes every byte.
    pub fn push(&mut self, path: &Path, len: usize) -> Option<&mut [u8]> {
        let sealed_len = len + ICRC_LEN;
        let start = self.end;
        if sealed_len > self.buffer.len() - start {
            return None;
        }
        match self.last_run() {
            Some(run) if run.accepts(path, sealed_len) => {
                run.count += 1;
                run.last = sealed_len;
            }
            _ => self.runs.push(Run {
                path: *path,
                start,
                segment: sealed_len,
                last: sealed_len,
                count: 1,
                corrupt_bit: None,
            }),
        }
        self.end += sealed_len;
        self.packets += 1;
        Some(&mut self.buffer[start..start + len])
    }

    /// Removes the last pushed packet. Does nothing if all packets were sent.
    pub fn cancel(&mut self) {
        let Some(run) = self.last_run() else { return };
        let cancelled_len = run.last;
        run.count -= 1;
        run.last = run.segment;
        if run.count == 0 {
            self.runs.pop();
        }
        self.end -= cancelled_len;
        self.packets -= 1;
        if self.packets == 0 {
            self.clear();
        }
    }

    /// Whether no packet is queued.
    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// Number of queued packets.
    pub fn len(&self) -> usize {
        self.packets
    }

    /// Drops every packet.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.first_run = 0;
        self.end = 0;
        self.packets = 0;
    }

    /// The queued packets in order.
    pub fn packets(&self) -> impl Iterator<Item = TxPacket<'_>> {
        self.packets_of_runs().map(|(run, _, bytes)| TxPacket { path: run.path, bytes })
    }

    /// The queued packets in order, each with its run and its index in it.
    pub(crate) fn packets_of_runs(&self) -> impl Iterator<Item = (&Run, u16, &[u8])> {
        self.runs[self.first_run..].iter().flat_map(|run| {
            let sealed = self.buffer[run.start..run.start + run.len()].chunks(run.segment);
            sealed.zip(0u16..).map(move |(packet, index)| (run, index, &packet[..packet.len() - ICRC_LEN]))
        })
    }

    /// Adds a copy of a packet. `corrupt_bit` is the bit to flip after the ICRC was computed; such a packet forms a
    /// separate run. Returns false if the batch is full.
    pub(crate) fn push_copy(&mut self, path: &Path, bytes: &[u8], corrupt_bit: Option<u32>) -> bool {
        let Some(buffer) = self.push(path, bytes.len()) else { return false };
        buffer.copy_from_slice(bytes);
        if corrupt_bit.is_some() {
            self.isolate_last();
            if let Some(run) = self.last_run() {
                run.corrupt_bit = corrupt_bit;
            }
        }
        true
    }

    /// Moves the last packet into a separate run.
    fn isolate_last(&mut self) {
        let Some(run) = self.last_run() else { return };
        if run.count == 1 {
            return;
        }
        let last = run.last;
        run.count -= 1;
        run.last = run.segment;
        let alone = Run {
            path: run.path,
            start: run.start + run.len(),
            segment: last,
            last,
            count: 1,
            corrupt_bit: None,
        };
        self.runs.push(alone);
    }

    /// The next run to send and its bytes.
    pub(crate) fn first(&mut self) -> Option<(Run, &mut [u8])> {
        let run = self.runs.get(self.first_run)?.clone();
        let range = run.start..run.start + run.len();
        Some((run, &mut self.buffer[range]))
    }

    /// Records that the first `count` packets of the first run were sent.
    pub(crate) fn advance(&mut self, count: usize) {
        let Some(run) = self.runs.get_mut(self.first_run) else { return };
        debug_assert!(count <= run.count);
        self.packets -= count;
        run.count -= count;
        if run.count == 0 {
            self.first_run += 1;
        } else {
            run.start += count * run.segment;
            if run.count == 1 {
                run.segment = run.last;
            }
        }
        if self.packets == 0 {
            self.clear();
        }
    }

    fn last_run(&mut self) -> Option<&mut Run> {
        self.runs[self.first_run..].last_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(port: u16) -> Path {
        let remote = std::net::SocketAddr::from(([10, 0, 0, 1], port));
        Path { remote, source_gid_index: 0, traffic_class: 0, hop_limit: 0, flow_label: 0 }
    }

    fn fill(tx: &mut TxBatch, port: u16, lens: &[usize]) {
        for len in lens {
            let number = tx.len() as u8;
            tx.push(&path(port), *len).expect("space").fill(number);
        }
    }

    /// Packets per run.
    fn runs(tx: &TxBatch) -> Vec<usize> {
        tx.runs[tx.first_run..].iter().map(|run| run.count).collect()
    }

    #[test]
    fn consecutive_packets_of_one_path_and_length_form_a_run_that_a_shorter_one_ends() {
        let mut tx = TxBatch::new(1 << 20);
        fill(&mut tx, 1, &[100, 100, 60, 60, 100]);
        fill(&mut tx, 2, &[100, 100]);
        assert_eq!(runs(&tx), [3, 1, 1, 2]);
    }

    #[test]
    fn runs_keep_the_limits_of_one_gso_send() {
        let mut tx = TxBatch::new(1 << 20);
        fill(&mut tx, 1, &[16; 100]);
        assert_eq!(runs(&tx), [64, 36]);
        tx.clear();
        fill(&mut tx, 1, &[4108; 20]);
        assert_eq!(runs(&tx), [15, 5]);
    }

    #[test]
    fn a_full_batch_accepts_no_packet_until_it_is_drained() {
        let mut tx = TxBatch::new(0);
        fill(&mut tx, 1, &[4092, 4092]);
        assert!(tx.push(&path(1), 12).is_none());
        tx.advance(2);
        assert!(tx.is_empty());
        assert!(tx.push(&path(1), 8188).is_some());
        tx.cancel();
        assert!(tx.push(&path(1), 8189).is_none());
    }

    #[test]
    fn cancelling_removes_the_last_packet_and_reopens_its_run() {
        let mut tx = TxBatch::new(1 << 16);
        fill(&mut tx, 1, &[100, 100, 60]);
        tx.cancel();
        fill(&mut tx, 1, &[100]);
        fill(&mut tx, 2, &[100]);
        tx.cancel();
        assert_eq!(runs(&tx), [3]);
        let firsts: Vec<u8> = tx.packets().map(|packet| packet.bytes[0]).collect();
        assert_eq!(firsts, [0, 1, 2]);
        for _ in 0..5 {
            tx.cancel();
        }
        assert!(tx.is_empty());
        assert_eq!(tx.end, 0);
    }

    #[test]
    fn a_partly_sent_run_keeps_its_other_packets() {
        let mut tx = TxBatch::new(1 << 16);
        fill(&mut tx, 1, &[100, 100, 100, 60]);
        tx.advance(2);
        assert_eq!(tx.packets().map(|packet| packet.bytes.len()).collect::<Vec<_>>(), [100, 60]);
        tx.advance(1);
        let (run, bytes) = tx.first().expect("one is left");
        assert_eq!((run.count, run.segment, bytes.len()), (1, 64, 64));
        tx.cancel();
        assert!(tx.is_empty());
    }

    #[test]
    fn a_corrupted_packet_has_a_separate_run() {
        let mut tx = TxBatch::new(1 << 16);
        fill(&mut tx, 1, &[100, 100]);
        assert!(tx.push_copy(&path(1), &[9; 100], Some(5)));
        fill(&mut tx, 1, &[100]);
        assert_eq!(runs(&tx), [2, 1, 1]);
        assert_eq!(tx.packets().map(|packet| packet.bytes[0]).collect::<Vec<_>>(), [0, 1, 9, 3]);
    }
}
