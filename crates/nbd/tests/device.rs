//! The device against a model: whatever requests are in flight, bytes read are those written last, and far memory has the
//! pages of whole blocks that were written and not trimmed.

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{Control, MemoryQueue};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use terrace_nbd::{CONNECTIONS_MAX, Device, ProtocolError, REQUEST_BYTES_MAX};

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
const FUA: u16 = 1;
const NO_HOLE: u16 = 2;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const PAGE: u64 = 4096;
const OUTPUT_BYTES: usize = 64 << 10;

/// A client of a device without sockets.
struct Harness {
    device: Device<MemoryQueue>,
    control: Arc<Control>,
    connection: usize,
    unhandled: Vec<u8>,
    output: Vec<u8>,
    /// Output that was taken and is no whole reply yet.
    received: Vec<u8>,
    /// READs without a reply: their lengths by cookie.
    reads: HashMap<u64, usize>,
    cookie: u64,
}

/// A reply: its cookie, error and data.
type Reply = (u64, u32, Vec<u8>);

impl Harness {
    fn new(page_count: u64, depth: usize, seed: u64) -> Harness {
        let (queue, control) = MemoryQueue::new(page_count, depth, seed);
        let mut device = Device::new(queue, CONNECTIONS_MAX);
        let connection = device.connect().expect("the first connection");
        let mut harness = Harness {
            device,
            control,
            connection,
            unhandled: Vec::new(),
            output: Vec::new(),
            received: Vec::new(),
            reads: HashMap::new(),
            cookie: 0,
        };
        harness.negotiate();
        harness
    }

    /// Flags, and the option to use the export without asking for more.
    fn negotiate(&mut self) {
        self.unhandled.extend_from_slice(&3u32.to_be_bytes());
        self.unhandled.extend_from_slice(b"IHAVEOPT\0\0\0\x01\0\0\0\0");
        self.step();
        assert_eq!(self.output.len(), 18 + 10);
        self.output.clear();
    }

    /// Appends a request, and returns its cookie.
    fn send(&mut self, command: u16, flags: u16, offset: u64, length: u32, data: &[u8]) -> u64 {
        self.cookie += 1;
        let out = &mut self.unhandled;
        out.extend_from_slice(&0x2560_9513u32.to_be_bytes());
        out.extend_from_slice(&flags.to_be_bytes());
        out.extend_from_slice(&command.to_be_bytes());
        out.extend_from_slice(&self.cookie.to_be_bytes());
        out.extend_from_slice(&offset.to_be_bytes());
        out.extend_from_slice(&length.to_be_bytes());
        out.extend_from_slice(data);
        if command == READ {
            self.reads.insert(self.cookie, length as usize);
        }
        self.cookie
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> u64 {
        self.send(WRITE, 0, offset, data.len() as u32, data)
    }

    fn step(&mut self) {
        let used = self.device.handle_input(self.connection, &self.unhandled).expect("valid requests");
        self.unhandled.drain(..used);
        self.device.advance();
        self.device.emit(self.connection, &mut self.output, OUTPUT_BYTES).expect("pages that were loaded");
        assert!(self.output.len() <= OUTPUT_BYTES);
    }

    /// Takes replies that are complete.
    fn take_replies(&mut self, replies: &mut Vec<Reply>) {
        self.received.append(&mut self.output);
        while self.received.len() >= 16 {
            let number =
                |at: usize| u32::from_be_bytes(self.received[at..at + 4].try_into().expect("4 bytes"));
            assert_eq!(number(0), 0x6744_6698);
            let (error, cookie) = (number(4), u64::from(number(8)) << 32 | u64::from(number(12)));
            let length = if error == 0 { self.reads.get(&cookie).copied().unwrap_or(0) } else { 0 };
            if self.received.len() < 16 + length {
                return;
            }
            let rest = self.received.split_off(16 + length);
            let reply = std::mem::replace(&mut self.received, rest);
            replies.push((cookie, error, reply[16..].to_vec()));
        }
    }

    /// The errors of all requests that are under way, in the order of their cookies.
    fn errors(&mut self) -> Vec<u32> {
        let mut replies = self.finish();
        replies.sort();
        replies.iter().map(|(_, error, _)| *error).collect()
    }

    fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        self.send(READ, 0, offset, length, &[]);
        let mut replies = self.finish();
        let (_, error, data) = replies.pop().expect("a reply");
        assert_eq!(error, 0);
        data
    }

    /// Runs until all requests are answered.
    fn finish(&mut self) -> Vec<Reply> {
        let mut replies = Vec::new();
        for _ in 0..1_000_000 {
            self.step();
            self.take_replies(&mut replies);
            let is_answered = self.output.is_empty() && self.received.is_empty();
            if self.unhandled.is_empty() && !self.device.is_busy() && is_answered {
                return replies;
            }
        }
        panic!("requests have no end");
    }
}

#[test]
fn absent_bytes_are_zeros_and_parts_of_pages_are_merged() {
    let mut device = Harness::new(64, 16, 1);
    assert_eq!(device.read(100, 9000), vec![0; 9000]);
    device.write(5000, &[7; 100]);
    assert_eq!(device.errors(), [0]);
    assert_eq!(device.control.stored_pages.load(Ordering::Relaxed), 1);
    let page = device.read(4096, 4096);
    assert_eq!(page[904..1004], [7; 100]);
    assert!(page[..904].iter().chain(&page[1004..]).all(|byte| *byte == 0));
    // The same page in pieces that are all in flight.
    for index in 0..64u8 {
        device.write(8192 + u64::from(index) * 64, &[index; 64]);
    }
    device.errors();
    let page = device.read(8192, 4096);
    assert!(page.iter().enumerate().all(|(index, byte)| usize::from(*byte) == index / 64));
}

#[test]
fn trim_and_zeroes_free_whole_pages() {
    let mut device = Harness::new(64, 16, 2);
    let stored = |device: &Harness| device.control.stored_pages.load(Ordering::Relaxed);
    device.write(0, &[9; 8 * 4096]);
    device.errors();
    assert_eq!(stored(&device), 8);
    // One whole page, and a half on each side.
    device.send(TRIM, 0, 2048, 8192, &[]);
    device.errors();
    assert_eq!((stored(&device), device.read(2048, 2048)), (7, vec![9; 2048]));
    device.send(WRITE_ZEROES, FUA, 3 * PAGE - 10, 4106, &[]);
    device.errors();
    assert_eq!((stored(&device), device.read(3 * PAGE - 10, 4106)), (6, vec![0; 4106]));
    assert_eq!(device.read(3 * PAGE - 20, 10), [9; 10]);
    // Memory is to be allocated.
    device.send(WRITE_ZEROES, NO_HOLE, 20 * PAGE, 8192, &[]);
    device.errors();
    assert_eq!(stored(&device), 8);
    // All of it, most of which is absent.
    device.send(TRIM, 0, 0, 64 * 4096, &[]);
    device.send(FLUSH, 0, 0, 0, &[]);
    assert_eq!(device.errors(), [0, 0]);
    assert_eq!(stored(&device), 0);
}

#[test]
fn requests_that_cannot_be_are_refused_and_the_next_is_answered() {
    let mut device = Harness::new(4096, 16, 3);
    let end = 4096 * PAGE;
    device.send(READ, 0, end - 1, 2, &[]);
    device.send(READ, 0, u64::MAX, 2, &[]);
    device.send(READ, 0, 0, REQUEST_BYTES_MAX + 1, &[]);
    device.write(end - 1, &[1, 2]);
    device.write(0, &vec![1; REQUEST_BYTES_MAX as usize + 1]);
    device.send(READ, NO_HOLE, 0, 1, &[]);
    device.send(99, 0, 0, 0, &[]);
    device.send(TRIM, 0, end, 1, &[]);
    device.send(WRITE_ZEROES, 0, 1, u32::MAX, &[]);
    device.send(WRITE_ZEROES, 1 << 4, 0, 1, &[]);
    device.send(READ, 0, 17, 0, &[]);
    device.write(17, &[]);
    device.send(READ, 0, 0, 1, &[]);
    let refused = [EINVAL, EINVAL, EINVAL, ENOSPC, EINVAL, EINVAL, EINVAL, EINVAL, ENOSPC, EINVAL];
    assert_eq!(device.errors(), [&refused[..], &[0, 0, 0]].concat());
    assert_eq!(device.control.stored_pages.load(Ordering::Relaxed), 0);
}

#[test]
fn the_data_of_a_refused_write_are_never_requests() {
    let mut device = Harness::new(64, 16, 7);
    device.write(0, &[1; 4096]);
    assert_eq!(device.errors(), [0]);
    // A request to trim the page, as data.
    device.send(TRIM, 0, 0, 4096, &[]);
    let data = std::mem::take(&mut device.unhandled);
    for offset in [u64::MAX, u64::MAX - data.len() as u64, 64 * PAGE] {
        device.write(offset, &data);
        device.write(offset, &[1; 4096]);
    }
    assert_eq!(device.errors(), [ENOSPC; 6]);
    assert_eq!(device.read(0, 4096), [1; 4096]);
}

#[test]
fn a_lost_node_is_eio_and_an_empty_pool_enospc() {
    let mut device = Harness::new(64, 16, 4);
    device.control.capacity.store(2, Ordering::Relaxed);
    device.write(0, &[1; 2 * 4096]);
    assert_eq!(device.errors(), [0]);
    device.write(0, &[2; 3 * 4096]);
    assert_eq!(device.errors(), [ENOSPC]);
    device.control.is_lost.store(true, Ordering::Relaxed);
    device.send(READ, 0, 0, 4096, &[]);
    device.write(100, &[1; 100]);
    device.send(TRIM, 0, 0, 4096, &[]);
    device.send(FLUSH, 0, 0, 0, &[]);
    assert_eq!(device.errors(), [EIO, EIO, EIO, 0]);
    device.control.is_lost.store(false, Ordering::Relaxed);
    assert_eq!(device.read(0, 4096), [2; 4096]);
}

#[test]
fn a_read_of_the_maximum_that_is_not_aligned() {
    let mut device = Harness::new(2048, 64, 5);
    let data: Vec<u8> = (0..REQUEST_BYTES_MAX).map(|index| (index % 251) as u8).collect();
    device.write(1000, &data);
    assert_eq!(device.errors(), [0]);
    assert_eq!(device.read(1000, REQUEST_BYTES_MAX), data);
    assert_eq!(device.control.in_flight_max.load(Ordering::Relaxed), 64);
}

#[test]
fn operations_go_on_after_their_connection_and_the_index_is_not_used_before_their_end() {
    let mut device = Harness::new(64, 16, 6);
    device.control.is_stopped.store(true, Ordering::Relaxed);
    device.write(0, &[1; 4096]);
    device.write(4096, &[2; 4096]);
    // Incomplete.
    device.send(WRITE, 0, 8192, 8192, &[3; 4096]);
    device.step();
    device.device.disconnect(device.connection);
    let others: Vec<usize> = std::iter::from_fn(|| device.device.connect()).collect();
    assert_eq!(others.len(), CONNECTIONS_MAX - 1);
    device.control.is_stopped.store(false, Ordering::Relaxed);
    while device.device.is_busy() {
        device.device.advance();
    }
    assert_eq!(device.device.connect(), Some(device.connection));
    device.output.clear();
    device.unhandled.clear();
    device.negotiate();
    assert_eq!(device.read(0, 1), [1]);
    assert_eq!(device.read(8192, 1), [3]);
}

#[test]
fn a_client_that_takes_no_replies_stops_itself_and_not_others() {
    let mut device = Harness::new(4096, 64, 7);
    for _ in 0..2000 {
        device.send(READ, 0, 0, 64 << 10, &[]);
    }
    for _ in 0..2000 {
        device.step();
    }
    assert!(device.unhandled.len() > 1000 * 28 && device.output.len() <= OUTPUT_BYTES);
    let other = device.device.connect().expect("a second connection");
    let (connection, kept) = (device.connection, std::mem::take(&mut device.output));
    let unhandled = std::mem::take(&mut device.unhandled);
    let reads = std::mem::take(&mut device.reads);
    device.connection = other;
    device.negotiate();
    device.write(0, &[5; 100]);
    assert_eq!((device.errors(), device.read(0, 100)), (vec![0], vec![5; 100]));
    (device.connection, device.output, device.unhandled, device.reads) = (connection, kept, unhandled, reads);
    assert_eq!(device.errors(), vec![0; 2000]);
}

#[test]
fn disconnect_answers_what_was_asked_before() {
    let mut device = Harness::new(64, 16, 8);
    device.write(0, &[1; 4096]);
    device.send(DISCONNECT, 0, 0, 0, &[]);
    device.write(0, &[2; 4096]);
    assert_eq!(device.errors(), [0]);
    assert!(device.device.has_ended(device.connection));
}

#[test]
fn a_request_without_its_magic_ends_the_connection() {
    let mut device = Harness::new(64, 16, 9);
    assert_eq!(device.device.handle_input(device.connection, &[0; 28]), Err(ProtocolError::Magic));
}

/// Requests in flight that do not overlap in bytes, but in pages.
#[test]
fn random_requests_agree_with_a_model() {
    for seed in 0..20 {
        let page_count = 40;
        let mut device = Harness::new(page_count, 24, seed);
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut model = vec![0u8; (page_count * PAGE) as usize];
        for _ in 0..40 {
            let mut wanted = HashMap::new();
            let mut at = rng.random_range(0..5000);
            loop {
                let length_max = [100, 5000, 20_000][rng.random_range(0..3)];
                let length = rng.random_range(1..length_max);
                if at + length > model.len() {
                    break;
                }
                let (range, offset) = (at..at + length, at as u64);
                match rng.random_range(0..5) {
                    0 => {
                        let cookie = device.send(READ, 0, offset, length as u32, &[]);
                        wanted.insert(cookie, model[range].to_vec());
                    }
                    1 | 2 => {
                        let data: Vec<u8> = (0..length).map(|_| rng.random()).collect();
                        device.write(offset, &data);
                        model[range].copy_from_slice(&data);
                    }
                    3 => {
                        let flags = [0, NO_HOLE][rng.random_range(0..2)];
                        device.send(WRITE_ZEROES, flags, offset, length as u32, &[]);
                        model[range].fill(0);
                    }
                    _ => {
                        device.send(TRIM, 0, offset, length as u32, &[]);
                        let whole = at.next_multiple_of(4096)..(at + length) / 4096 * 4096;
                        if !whole.is_empty() {
                            model[whole].fill(0);
                        }
                    }
                }
                at += length + [0, 0, 300, 9000][rng.random_range(0..4)];
            }
            for (cookie, error, data) in device.finish() {
                assert_eq!(error, 0);
                if let Some(wanted) = wanted.remove(&cookie) {
                    assert!(data == wanted, "seed {seed}");
                }
            }
            assert!(wanted.is_empty());
        }
        let all = model.len() as u32;
        assert!(device.read(0, all) == model, "seed {seed}");
    }
}
