//! Rings of packets in every interleaving that loom finds: packets arrive whole and in order, the producer does not
//! write over what is not read yet, and a consumer that goes to sleep misses no packet.
//!
//! The files of `src/ring` and `handshake.rs` are compiled here once more, with loom's atomics, a ring of four cache lines, and a
//! segment that has both sides in one process. Loom watches the records' bytes as they are accessed. The address in a
//! record is not checked: the consumer reads it as numbers, which are not the same memory here.
//!
//! This target has no harness of the compiler's: that would run the tests within `ring/mod.rs`, which are outside of a
//! model.
//!
//! Mutations that this has found: a relaxed store in `handshake::publish`, or no fence; a relaxed load in `first_word`;
//! a relaxed store of the head in `read`, or one before a run is read; a relaxed load of the head in `has_room`; no
//! `end_at` in `write_stage`; no space for the 0 in `push`; no fence in `fall_asleep`; a doorbell that is rung for one
//! sleep only.

#[path = "../src/handshake.rs"]
#[allow(dead_code, reason = "the model uses not all of it")]
mod handshake;
mod loom_common;
#[path = "../src/ring/mod.rs"]
#[allow(dead_code, unused_imports, reason = "the model uses not all of it, and none of its tests")]
mod ring;
#[path = "loom_common/sync.rs"]
#[allow(dead_code, unused_imports, reason = "the model uses not all of it")]
mod sync;

/// Stands in for `src/segment.rs`: memory of this process, which descriptors name.
mod segment {
    use std::cell::RefCell;
    use std::collections::HashMap;
    use std::ffi::CStr;
    use std::io;
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;

    use loom::cell::UnsafeCell;

    use crate::sync::{AtomicU64, RING_BYTES};

    #[derive(Debug, PartialEq, Eq)]
    pub(crate) enum Others {
        Read,
    }

    const LINE_BYTES: usize = 64;

    #[derive(Debug)]
    struct Memory {
        /// The first numbers of each cache line.
        numbers: Vec<[AtomicU64; 3]>,
        /// For each cache line: whether its bytes are accessed.
        lines: Vec<UnsafeCell<()>>,
        /// The bytes. They are accessed by address alone.
        bytes: Box<[u64]>,
    }

    // SAFETY: loom watches the accesses to the lines.
    unsafe impl Sync for Memory {}
    // SAFETY: cells and bytes.
    unsafe impl Send for Memory {}

    thread_local! {
        /// Memory by the number of the file that stands for it. Loom's threads are all on one thread of the system.
        static FILES: RefCell<HashMap<u64, Arc<Memory>>> = RefCell::default();
    }

    /// To be called after each execution.
    pub(crate) fn forget_files() {
        FILES.with(|files| files.borrow_mut().clear());
    }

    fn number_of(file: BorrowedFd<'_>) -> io::Result<u64> {
        Ok(std::fs::File::from(file.try_clone_to_owned()?).metadata()?.ino())
    }

    #[derive(Debug)]
    pub(crate) struct Segment {
        file: OwnedFd,
        memory: Arc<Memory>,
        is_ours: bool,
    }

    impl Segment {
        pub(crate) fn create(_: &CStr, len: usize, _: Others) -> io::Result<Segment> {
            let file = OwnedFd::from(std::io::pipe()?.0);
            // Nothing is accessed in the rest of the consumer page.
            let lines = 0..len.min(RING_BYTES as usize) / LINE_BYTES;
            let memory = Arc::new(Memory {
                numbers: lines.clone().map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect(),
                lines: lines.map(|_| UnsafeCell::new(())).collect(),
                bytes: vec![0; len / 8].into(),
            });
            let number = number_of(file.as_fd())?;
            FILES.with(|files| files.borrow_mut().insert(number, memory.clone()));
            Ok(Segment { file, memory, is_ours: true })
        }

        pub(crate) fn open(file: OwnedFd, _: usize, _: bool) -> io::Result<Segment> {
            let number = number_of(file.as_fd())?;
            let memory = FILES.with(|files| files.borrow().get(&number).cloned());
            let memory = memory.ok_or(io::ErrorKind::InvalidData)?;
            Ok(Segment { file, memory, is_ours: false })
        }

        pub(crate) fn file(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }

        pub(crate) fn quads(&self, offset: usize, count: usize) -> &[AtomicU64] {
            assert!(offset.is_multiple_of(LINE_BYTES));
            &self.memory.numbers[offset / LINE_BYTES][..count]
        }

        /// The caller is about to write the bytes, or if the segment is not its own, to read them.
        pub(crate) fn bytes_at(&self, offset: usize, len: usize) -> u64 {
            assert!(offset + len <= self.memory.lines.len() * LINE_BYTES);
            for line in offset / LINE_BYTES..(offset + len).div_ceil(LINE_BYTES) {
                match self.is_ours {
                    true => self.memory.lines[line].with_mut(|_| ()),
                    false => self.memory.lines[line].with(|_| ()),
                }
            }
            self.memory.bytes.as_ptr() as u64 + offset as u64
        }

        pub(crate) fn prefetch(&self, _: usize) {}

        pub(crate) fn prefetch_to_write(&self, _: usize) {}
    }
}

use std::net::Ipv6Addr;

use libtest_mimic::{Arguments, Trial};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use loom_common::model;
use ring::{Origin, RingFile, RxRing, TxRing};
use terrace_hostmem::CopySource;

const FROM: Origin = Origin { address: Ipv6Addr::UNSPECIFIED, port: 4799, traffic_class: 7 };
/// A packet of one cache line, and a run of two.
const SHORT: usize = 16;
const LONG: usize = 64;

fn pair() -> (TxRing, RxRing) {
    let file = RingFile::new().expect("made");
    let rx_ring = RxRing::new(file.file().try_clone_to_owned().expect("a descriptor")).expect("mapped");
    let consumer_page = rx_ring.consumer_page().try_clone_to_owned().expect("a descriptor");
    let tx_ring = TxRing::new(file, consumer_page).expect("mapped");
    segment::forget_files();
    (tx_ring, rx_ring)
}

/// Sends the packets, each full of its number, as far as there is room; a batch for each of `batches`. Returns how many
/// packets it has sent, and whether the doorbell is to be rung for the last batch.
fn send(tx_ring: &TxRing, batches: &[&[usize]], mut rung: impl FnMut()) -> usize {
    let mut sent = 0;
    for batch in batches {
        let mut writer = tx_ring.write();
        for &len in *batch {
            let Some(packet) = writer.push(&FROM, len) else { break };
            sent += 1;
            packet.fill(sent as u8);
        }
        if writer.publish() {
            rung();
        }
    }
    sent
}

/// Reads what is there. `received` counts the packets.
fn receive(rx_ring: &mut RxRing, received: &mut usize) {
    rx_ring.read(usize::MAX, |packet| {
        *received += 1;
        assert_eq!((packet.origin, packet.acknowledged), (&FROM, None));
        let check = |bytes: &[u8]| {
            assert!(bytes.iter().all(|&byte| usize::from(byte) == *received), "packet {received}: {bytes:?}");
        };
        check(packet.bytes);
        if let Some(run) = packet.run {
            // Before `check`: another thread may run now, and write over the run if its space was given back.
            thread::yield_now();
            run.with_bytes(check).expect("mapped");
        }
    });
}

/// All packets that are sent arrive, while the consumer polls so many times.
fn all_arrive(preemptions: usize, batches: &'static [&'static [usize]], polls: usize) {
    model(preemptions, move || {
        let (tx_ring, mut rx_ring) = pair();
        let producer = thread::spawn(move || send(&tx_ring, batches, || ()));
        let mut received = 0;
        for _ in 0..polls {
            receive(&mut rx_ring, &mut received);
        }
        let sent = producer.join().unwrap();
        receive(&mut rx_ring, &mut received);
        assert_eq!((received, rx_ring.is_empty(), rx_ring.is_broken()), (sent, true, false));
    });
}

fn packets_arrive_whole_and_in_order() {
    all_arrive(5, &[&[SHORT], &[SHORT], &[SHORT]], 3);
}

fn batches_arrive_whole() {
    all_arrive(5, &[&[SHORT, SHORT], &[SHORT]], 3);
}

fn what_is_not_read_is_not_written_over() {
    all_arrive(5, &[&[SHORT], &[SHORT], &[SHORT], &[SHORT], &[SHORT]], 3);
}

fn runs_are_read_before_their_space_is_given_back() {
    all_arrive(4, &[&[LONG], &[LONG], &[SHORT]], 2);
}

fn records_that_do_not_fit_behind_the_last_one_begin_at_the_start() {
    all_arrive(5, &[&[LONG], &[SHORT], &[LONG]], 3);
}

/// A doorbell that keeps a ring until the consumer has heard it.
#[derive(Default)]
struct Doorbell {
    is_rung: Mutex<bool>,
    heard: Condvar,
}

impl Doorbell {
    fn ring(&self) {
        *self.is_rung.lock().unwrap() = true;
        self.heard.notify_one();
    }

    fn wait(&self) {
        let mut is_rung = self.is_rung.lock().unwrap();
        while !*is_rung {
            is_rung = self.heard.wait(is_rung).unwrap();
        }
        *is_rung = false;
    }
}

/// The consumer sleeps whenever there is nothing. Loom finds out when it sleeps for ever.
fn a_consumer_that_sleeps_is_rung_for() {
    model(5, || {
        let (tx_ring, mut rx_ring) = pair();
        let doorbell = Arc::new(Doorbell::default());
        let producer = {
            let doorbell = doorbell.clone();
            thread::spawn(move || send(&tx_ring, &[&[SHORT], &[SHORT]], || doorbell.ring()))
        };
        let mut received = 0;
        while received < 2 {
            rx_ring.fall_asleep();
            if rx_ring.is_empty() {
                doorbell.wait();
            }
            rx_ring.wake_up();
            receive(&mut rx_ring, &mut received);
        }
        assert_eq!(producer.join().unwrap(), 2);
    });
}

fn main() {
    let trials: [(&str, fn()); 6] = [
        ("packets_arrive_whole_and_in_order", packets_arrive_whole_and_in_order),
        ("batches_arrive_whole", batches_arrive_whole),
        ("runs_are_read_before_their_space_is_given_back", runs_are_read_before_their_space_is_given_back),
        ("what_is_not_read_is_not_written_over", what_is_not_read_is_not_written_over),
        (
            "records_that_do_not_fit_behind_the_last_one_begin_at_the_start",
            records_that_do_not_fit_behind_the_last_one_begin_at_the_start,
        ),
        ("a_consumer_that_sleeps_is_rung_for", a_consumer_that_sleeps_is_rung_for),
    ];
    let trials = trials.map(|(name, run)| {
        Trial::test(name, move || {
            run();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit();
}
