use super::*;

const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const OTHER_PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));
const MS: u64 = 1_000_000;

fn faults(plan: &str) -> Faults {
    Faults::new(FaultPlan::parse(plan).expect("a plan"), "test")
}

/// The times, in milliseconds, at which a packet of this direction is lost.
fn lost_at(faults: &Faults, direction: Direction, times_ms: Range<u64>) -> Vec<u64> {
    times_ms.filter(|ms| faults.packet_at(direction, PEER, ms * MS).lost).collect()
}

#[test]
fn a_plan_without_scheduled_faults_has_no_effect() {
    let faults = faults("loss = 1.0");
    assert_eq!(faults.packet(Direction::Out, PEER), PacketFate::default());
    assert!(!faults.withholds_receive(PEER));
    assert_eq!(faults.storage(StorageOperation::Read), StorageFate::default());
    assert_eq!(faults.summary(), "fault plan test has injected: nothing");
}

#[test]
fn a_blackhole_drops_both_directions_for_its_duration() {
    let faults = faults("[[fault]]\nkind = \"blackhole\"\nafter_ms = 10\nfor_ms = 5");
    assert!(faults.has_receive_faults());
    assert_eq!(lost_at(&faults, Direction::Out, 0..13), [10, 11, 12]);
    assert_eq!(lost_at(&faults, Direction::In, 13..30), [13, 14]);
    assert_eq!(faults.counts().get(Injected::PacketBlackholed), 5);
}

#[test]
fn a_blackhole_of_one_direction_does_not_affect_the_other() {
    let faults = faults("[[fault]]\nkind = \"blackhole\"\ndirection = \"in\"");
    assert!(!faults.packet_at(Direction::Out, PEER, 0).lost);
    assert!(faults.packet_at(Direction::In, PEER, 0).lost);
}

#[test]
fn loss_applies_to_sent_packets_by_default() {
    let outward = faults("[[fault]]\nkind = \"loss\"");
    assert!(outward.packet_at(Direction::Out, PEER, 0).lost && !outward.has_receive_faults());
    assert!(!outward.packet_at(Direction::In, PEER, 0).lost);
    let inward = faults("[[fault]]\nkind = \"loss\"\ndirection = \"in\"");
    assert!(inward.packet_at(Direction::In, PEER, 0).lost && inward.has_receive_faults());
}

#[test]
fn a_fault_of_one_peer_counts_only_its_packets() {
    let plan = "[[fault]]\nkind = \"loss\"\npeer = \"192.0.2.2\"\nafter_packets = 1\nfor_packets = 1";
    let faults = faults(plan);
    let lost = |peer| faults.packet_at(Direction::Out, peer, 0).lost;
    let mapped = IpAddr::V6("::ffff:192.0.2.2".parse().unwrap());
    assert_eq!(
        [lost(PEER), lost(OTHER_PEER), lost(PEER), lost(mapped), lost(OTHER_PEER)],
        [false, false, false, true, false]
    );
}

#[test]
fn draws_depend_on_the_seed_and_not_on_other_faults() {
    let drawn = |plan: &str| lost_at(&faults(plan), Direction::Out, 0..400);
    let loss = "[[fault]]\nkind = \"loss\"\nprobability = 0.25\n";
    let first = drawn(&format!("seed = 7\n{loss}"));
    assert!((60..140).contains(&first.len()), "{}", first.len());
    assert_eq!(first, drawn(&format!("seed = 7\n{loss}")));
    assert_ne!(first, drawn(&format!("seed = 8\n{loss}")));
    let corrupt = "[[fault]]\nkind = \"corrupt\"\nprobability = 0.5\n";
    assert_eq!(first, drawn(&format!("seed = 7\n{loss}{corrupt}")));
}

#[test]
fn several_faults_apply_to_one_packet() {
    let kinds = ["duplicate", "corrupt", "ecn-mark", "reorder", "delay\"\ndelay_us_min = \"3"];
    let plan: String = kinds.map(|kind| format!("[[fault]]\nkind = \"{kind}\"\n")).concat();
    let faults = faults(&plan.replace("\"3\"", "3"));
    let fate = faults.packet_at(Direction::Out, PEER, 0);
    assert!(!fate.lost && fate.mark && fate.corrupt_bit.is_some());
    assert_eq!((fate.extra_copies, fate.delay_ns), (1, 3000));
    assert!((1..=100_000).contains(&fate.reorder_ns));
    assert_eq!(faults.counts().named().filter(|(_, count)| *count == 1).count(), 5);
}

#[test]
fn receives_are_withheld_by_count() {
    let faults = faults("[[fault]]\nkind = \"rnr\"\nafter_operations = 2\nfor_operations = 3");
    let withheld: Vec<bool> = (0..7).map(|_| faults.withholds_receive(PEER)).collect();
    assert_eq!(withheld, [false, false, true, true, true, false, false]);
    assert_eq!(faults.counts().get(Injected::RnrNak), 3);
}

#[test]
fn storage_faults_apply_by_operation() {
    let slow =
        "[[fault]]\nkind = \"slow-storage\"\ndelay_us_min = 20\ndelay_us_max = 30\noperation = \"read\"\n";
    let full = "[[fault]]\nkind = \"failing-storage\"\nerror = \"no-space\"\n";
    let faults = faults(&format!("{slow}{full}"));
    let read = faults.storage(StorageOperation::Read);
    assert!((20..=30).contains(&read.delay.as_micros()) && read.error.is_none());
    let write = faults.storage(StorageOperation::Write);
    assert_eq!(write, StorageFate { delay: Duration::ZERO, error: Some(ENOSPC) });
    assert_eq!(faults.storage(StorageOperation::Sync), StorageFate::default());
    assert_eq!(faults.summary(), "fault plan test has injected: storage_slowed 1, storage_failed 1");
}

#[test]
fn failing_storage_fails_all_operations_by_default() {
    let all = faults("[[fault]]\nkind = \"failing-storage\"");
    let operations = [StorageOperation::Read, StorageOperation::Write, StorageOperation::Sync];
    assert!(operations.iter().all(|operation| all.storage(*operation).error == Some(EIO)));
    let syncs = faults("[[fault]]\nkind = \"failing-storage\"\noperation = \"sync\"");
    assert_eq!(operations.map(|operation| syncs.storage(operation).error), [None, None, Some(EIO)]);
}

#[test]
fn devices_with_one_file_share_its_plan() {
    let path = std::env::temp_dir().join(format!("terrace-faults-{}.toml", std::process::id()));
    std::fs::write(&path, "seed = 3\n").expect("a file");
    let first = Faults::of_process(&path).expect("a plan");
    assert!(Arc::ptr_eq(&first, &Faults::of_process(&path).expect("a plan")));
    assert!(Faults::all_of_process().iter().any(|faults| Arc::ptr_eq(faults, &first)));
    first.counts.add(Injected::RnrNak);
    drop(first);
    assert_eq!(Faults::of_process(&path).expect("a plan").counts().get(Injected::RnrNak), 0);
    std::fs::remove_file(&path).expect("removed");
    assert!(Faults::of_process(&path).is_err());
}
