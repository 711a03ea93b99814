//! A ring of packets in shared memory, from one process to another of the same host: one producer, one consumer.
//!
//! There are two segments, each written by one side only, so that neither side can change what the other relies on:
//!
//! ```text
//!   the producer's                                  the consumer's (the consumer page)
//!   record | record | 0 ...                         head | sleep
//!
//!   writes records, and 0 behind them;              reads records up to the 0, head = behind them
//!   the first record's first word comes last
//!   -- full fence --                                sleep = odd
//!   sleep is odd, and no doorbell was rung for it?  -- full fence --
//!   rings the doorbell                              is there a record? then it does not sleep
//! ```
//! There is no tail that the consumer would have to fetch from the producer's cache before the record: the consumer
//! polls the place of the next record. Positions count bytes and never wrap; a record never crosses a multiple of the
//! ring's size. A process that dies leaves nothing locked: its unfinished records are behind a 0, and the consumer has
//! not seen them.

mod record;
mod rx;
mod tx;

use std::io;
use std::os::fd::BorrowedFd;

pub use self::record::{Origin, RUN_BYTES_MAX};
pub use self::rx::{RxPacket, RxRing};
pub use self::tx::{TxRing, Writer};
use crate::segment::{Others, Segment};
use crate::sync::RING_BYTES;

/// Size of the consumer page.
const CONSUMER_PAGE_BYTES: usize = 4096;
/// Where in the consumer page `sleep` is: on another cache line than the head.
const SLEEP_AT: usize = 64;

/// The producer's segment, before the consumer has answered.
#[derive(Debug)]
pub struct RingFile(Segment);

impl RingFile {
    /// An empty ring.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new() -> io::Result<RingFile> {
        Segment::create(c"terrace-ring", RING_BYTES as usize, Others::Read).map(RingFile)
    }

    /// To be sent to the consumer.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.file()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};
    use terrace_hostmem::CopySource;

    use super::record::*;
    use super::*;
    use crate::sync::{Ordering, PACKET_BYTES_MAX};

    const FROM: Origin =
        Origin { address: Ipv6Addr::new(1, 2, 3, 4, 5, 6, 7, 8), port: 4799, traffic_class: 7 };

    fn pair() -> (TxRing, RxRing) {
        let ring = RingFile::new().expect("made");
        let rx_ring = RxRing::new(ring.file().try_clone_to_owned().expect("a descriptor")).expect("mapped");
        let consumer_page = rx_ring.consumer_page().try_clone_to_owned().expect("a descriptor");
        (TxRing::new(ring, consumer_page).expect("mapped"), rx_ring)
    }

    fn send(tx_ring: &TxRing, bytes: &[u8]) -> Option<bool> {
        let mut writer = tx_ring.write();
        writer.push(&FROM, bytes.len())?.copy_from_slice(bytes);
        Some(writer.publish())
    }

    fn received(rx_ring: &mut RxRing) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        rx_ring.read(usize::MAX, |packet| {
            assert_eq!(*packet.origin, FROM);
            let bytes = match packet.run {
                None => packet.bytes.to_vec(),
                Some(run) => run.with_bytes(<[u8]>::to_vec).expect("mapped"),
            };
            assert!(bytes.starts_with(packet.bytes));
            all.push(bytes);
        });
        all
    }

    #[test]
    fn a_packet_carries_one_acknowledgement() {
        let (tx_ring, mut rx_ring) = pair();
        let mut writer = tx_ring.write();
        assert!(!writer.carry_ack(1), "there is no packet");
        writer.push(&FROM, 12).expect("room").fill(1);
        writer.push(&FROM, 16).expect("room").fill(2);
        assert_eq!(writer.unpublished_bytes(), 2 * RECORD_ALIGNMENT);
        assert!(writer.carry_ack(0x8100_0203));
        assert!(!writer.carry_ack(4));
        writer.publish();
        assert_eq!(writer.unpublished_bytes(), 0);
        assert!(!writer.carry_ack(5), "it may have been read");
        writer.push(&FROM, 24).expect("room").fill(4);
        writer.push(&FROM, 28).expect("room").fill(5);
        writer.cancel();
        assert!(!writer.carry_ack(6), "it is not there any more");
        writer.publish();
        writer.push(&FROM, 20).expect("room").fill(3);
        writer.publish();
        drop(writer);
        let mut all = Vec::new();
        rx_ring.read(9, |packet| {
            assert_eq!(*packet.origin, FROM);
            all.push((packet.acknowledged, packet.bytes.len()));
        });
        assert_eq!(all, [(None, 12), (Some(0x00_0203), 16), (None, 24), (None, 20)]);
    }

    #[test]
    fn each_packet_says_where_it_comes_from() {
        let (tx_ring, mut rx_ring) = pair();
        let nowhere = Origin { address: Ipv6Addr::UNSPECIFIED, port: 0, traffic_class: 0 };
        let others = [
            Origin { port: 4798, ..FROM },
            Origin { traffic_class: 3, ..FROM },
            Origin { address: Ipv6Addr::new(1, 2, 3, 9, 5, 6, 7, 8), ..FROM },
            Origin { address: Ipv6Addr::new(1, 2, 3, 4, 5, 6, 7, 9), ..FROM },
        ];
        let sent: Vec<_> =
            [nowhere].into_iter().chain(others.into_iter().flat_map(|other| [FROM, other, other])).collect();
        for from in &sent {
            let mut writer = tx_ring.write();
            writer.push(from, 16).expect("room").fill(1);
            // The acknowledgement in the same word is no part of the origin.
            writer.carry_ack(0xff_ffff);
            writer.publish();
        }
        let mut got = Vec::new();
        rx_ring.read(usize::MAX, |packet| got.push(*packet.origin));
        assert_eq!(got, sent);
    }

    #[test]
    fn a_record_of_no_packet_is_one() {
        let (tx_ring, mut rx_ring) = pair();
        assert_eq!(send(&tx_ring, &[]), Some(false));
        assert_eq!(send(&tx_ring, &[1; 12]), Some(false));
        assert_eq!(received(&mut rx_ring), [vec![], vec![1; 12]]);
    }

    #[test]
    fn packets_arrive_in_order_round_and_round() {
        let (tx_ring, mut rx_ring) = pair();
        let mut rng = StdRng::seed_from_u64(5);
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        for round in 0..20_000u32 {
            let len = rng.random_range(12..PACKET_BYTES_MAX);
            let packet = vec![round as u8; len];
            if send(&tx_ring, &packet).is_some() {
                sent.push(packet);
            }
            if rng.random_ratio(1, 60) {
                got.extend(received(&mut rx_ring));
            }
            if got.len() == sent.len() {
                assert_eq!(got, sent);
                got.clear();
                sent.clear();
            }
        }
        got.extend(received(&mut rx_ring));
        assert_eq!(got, sent);
        assert!(!rx_ring.is_broken());
    }

    #[test]
    fn a_full_ring_takes_nothing_until_something_was_read() {
        let (tx_ring, mut rx_ring) = pair();
        let count = (0..).take_while(|_| send(&tx_ring, &[1; 4096]).is_some()).count();
        assert_eq!(count as u64, RING_BYTES / (4096 + 64));
        assert_eq!(rx_ring.read(1, |_| ()), 1);
        assert_eq!(send(&tx_ring, &[1; 4096]), None, "there is no room for the word behind it");
        assert_eq!(rx_ring.read(1, |_| ()), 1);
        assert_eq!(send(&tx_ring, &[1; 4096]), Some(false));
        assert_eq!(send(&tx_ring, &[1; 4096]), None);
        assert!(tx_ring.write().push(&FROM, PACKET_BYTES_MAX + 1).is_none());
    }

    #[test]
    fn what_is_not_published_was_never_there() {
        let (tx_ring, mut rx_ring) = pair();
        {
            let mut writer = tx_ring.write();
            writer.push(&FROM, 100).expect("room").fill(1);
            writer.push(&FROM, 100).expect("room").fill(2);
            writer.cancel();
            assert!(!writer.is_empty());
            assert!(!writer.publish());
        }
        {
            let mut writer = tx_ring.write();
            writer.push(&FROM, 100).expect("room").fill(3);
        }
        assert_eq!(received(&mut rx_ring), [vec![1; 100]]);
        assert!(rx_ring.is_empty());
    }

    #[test]
    fn the_bell_is_rung_once_for_each_sleep() {
        let (tx_ring, mut rx_ring) = pair();
        assert_eq!(send(&tx_ring, &[0; 12]), Some(false));
        rx_ring.fall_asleep();
        assert!(!rx_ring.is_empty(), "so it does not sleep");
        assert_eq!(send(&tx_ring, &[0; 12]), Some(true));
        assert_eq!(send(&tx_ring, &[0; 12]), Some(false));
        rx_ring.wake_up();
        assert_eq!(received(&mut rx_ring).len(), 3);
        assert_eq!(send(&tx_ring, &[0; 12]), Some(false));
        rx_ring.fall_asleep();
        rx_ring.fall_asleep();
        assert_eq!(send(&tx_ring, &[0; 12]), Some(true));
    }

    #[test]
    fn a_writer_that_writes_nonsense_is_not_read_any_more() {
        let too_long = RUN_RECORD_BYTES_MAX as u64 + 1;
        for (records_before, numbers) in [(0, LEN_MASK - 1), (0, too_long), (0, SKIP), (125, 4096 + 200)] {
            let (tx_ring, mut rx_ring) = pair();
            for _ in 0..records_before {
                send(&tx_ring, &[1; 4096]).expect("room");
            }
            assert_eq!(rx_ring.read(usize::MAX, |_| ()), records_before);
            header(&tx_ring.ring, rx_ring.head)[0].store(numbers, Ordering::Release);
            assert_eq!(rx_ring.read(10, |_| ()), 0);
            assert!(rx_ring.is_broken() && rx_ring.is_empty(), "{records_before} {numbers}");
        }
    }

    #[test]
    fn a_writer_that_has_gone_without_an_end_is_read_for_one_lap() {
        let (tx_ring, mut rx_ring) = pair();
        for at in (0..RING_BYTES).step_by(RECORD_ALIGNMENT as usize) {
            header(&tx_ring.ring, at)[0].store(12, Ordering::Release);
        }
        assert_eq!(rx_ring.read(100, |_| ()), 100);
        rx_ring.end();
        rx_ring.end();
        assert_eq!(rx_ring.read(usize::MAX, |_| ()) as u64, RING_BYTES / RECORD_ALIGNMENT);
        assert!(rx_ring.is_empty() && !rx_ring.is_broken());
    }

    /// What an earlier lap left in the ring is no record, whatever it looks like.
    #[test]
    fn what_looks_like_a_record_is_none_until_it_is_written() {
        let (tx_ring, mut rx_ring) = pair();
        let mut rng = StdRng::seed_from_u64(6);
        let header = (12u64 | u64::from(FROM.port) << PORT_SHIFT).to_ne_bytes();
        for _ in 0..20_000 {
            let packet = header.repeat(rng.random_range(2..60));
            let mut writer = tx_ring.write();
            for _ in 0..rng.random_range(1..4) {
                writer.push(&FROM, packet.len()).expect("room").copy_from_slice(&packet);
                if rng.random_ratio(1, 3) {
                    writer.push(&FROM, packet.len()).expect("room").copy_from_slice(&packet);
                    writer.cancel();
                }
            }
            if rng.random_ratio(1, 4) {
                // Cancelled.
                drop(writer);
                assert!(rx_ring.is_empty());
                continue;
            }
            writer.publish();
            rx_ring.read(usize::MAX, |read| assert_eq!(read.bytes, packet));
            assert!(rx_ring.is_empty() && !rx_ring.is_broken());
        }
    }

    #[test]
    fn a_reader_whose_head_makes_no_sense_only_gets_nothing() {
        let (tx_ring, rx_ring) = pair();
        rx_ring.consumer_page.quads(0, 1)[0].store(u64::MAX / 2, Ordering::Release);
        let count = (0..1000).take_while(|_| send(&tx_ring, &[1; 4096]).is_some()).count();
        assert!(count as u64 <= RING_BYTES / 4096);
    }
}
