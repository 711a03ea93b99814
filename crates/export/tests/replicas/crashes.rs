//! Exports and writers that are killed and stopped at random moments under load. `TERRACE_REPLICA_ROUNDS` sets how often.

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rustix::process::Signal;
use terrace_export::{ReplicaError, ReplicaStatus, ReplicatedFile};
use terrace_nic::PathChoice;

use crate::hosts::{Host, TIMEOUT, addresses, config, hosts, less_than_timeouts, start_writer};
use crate::load::{IN_FLIGHT, Load, make, record};

fn rounds() -> u64 {
    std::env::var("TERRACE_REPLICA_ROUNDS").map_or(3, |rounds| rounds.parse().unwrap())
}

/// Checks that each member of a file has these bytes.
fn check_members(hosts: &[Host], status: &ReplicaStatus, bytes: &[u8], what: &str) {
    assert!(!status.members.is_empty(), "{what}");
    for host in hosts.iter().filter(|host| status.members.contains(&host.address)) {
        assert!(host.bytes() == bytes, "{what}: {} has other bytes; {status:?}", host.address);
    }
}

/// Kills and stops up to two exports, one after another, and returns them.
fn disturb(hosts: &mut [Host], random: &mut StdRng) -> Vec<usize> {
    let mut left: Vec<usize> = (0..hosts.len()).collect();
    let count = random.random_range(1..hosts.len());
    (0..count)
        .map(|_| {
            std::thread::sleep(Duration::from_micros(random.random_range(0..60_000)));
            let index = left.swap_remove(random.random_range(0..left.len()));
            hosts[index].end(*[Signal::KILL, Signal::STOP].choose(random).unwrap());
            index
        })
        .collect()
}

/// The writer is this process. Two exports at most fail in each round, and return.
fn no_write_is_lost_with_exports(path: PathChoice, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut hosts = hosts(path);
    let config = config(&addresses(&hosts), path);
    let mut file = ReplicatedFile::create(&config, 0o644).unwrap();
    let mut load = Load::new(seed);
    for round in 0..rounds() {
        let what = format!("seed {seed}, round {round}");
        assert_eq!(file.status().members.len(), 3, "{what}: {:?}", file.status());
        let ended = std::thread::scope(|scope| {
            let killer = scope.spawn(|| disturb(&mut hosts, &mut random));
            let until = Instant::now() + Duration::from_millis(200);
            while Instant::now() < until || !killer.is_finished() {
                let change = load.next();
                let begun = Instant::now();
                let made = make(&mut file, &change);
                assert!(made.is_ok(), "{what}: {made:?}, {:?}", file.status());
                load.apply(&change);
                // Two exports can fail one after another, while a write and then an epoch waits for them.
                assert!(begun.elapsed() < less_than_timeouts(3), "{what}: {:?}", begun.elapsed());
            }
            killer.join().unwrap()
        });
        // Those that have failed in the last moment are noticed now.
        let change = load.next();
        let made = make(&mut file, &change);
        let status = file.status();
        assert!(made.is_ok(), "{what}: {made:?}, {status:?}");
        load.apply(&change);
        assert_eq!(status.members.len(), 3 - ended.len(), "{what}: {status:?}");
        assert_eq!(status.outside.len(), ended.len(), "{what}: {status:?}");
        check_members(&hosts, &status, &load.bytes, &what);
        ended.into_iter().for_each(|index| hosts[index].go_on());
        file.resynchronize().unwrap();
        check_members(&hosts, &file.status(), &load.bytes, &what);
    }
    file.close().unwrap();
    let file = ReplicatedFile::open(&config).unwrap();
    assert_eq!(file.status().members.len(), 3, "{:?}", file.status());
    check_members(&hosts, &file.status(), &load.bytes, "at the end");
}

#[test]
fn no_write_is_lost_with_exports_by_packets() {
    no_write_is_lost_with_exports(PathChoice::Udp, 1);
}

#[test]
fn no_write_is_lost_with_exports_within_the_host() {
    no_write_is_lost_with_exports(PathChoice::Local, 2);
}

/// Writers and exports are killed; the next writer finds what was acknowledged, or is refused while an export is missing that
/// may have more.
fn no_write_is_lost_with_writers(path: PathChoice, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    for round in 0..rounds() {
        let (what, seed) = (format!("seed {seed}, round {round}"), random.random());
        let mut hosts = hosts(path);
        let mut writer = start_writer("create", &hosts, path, seed);
        let mut ended = Vec::new();
        writer.expect("open ");
        std::thread::sleep(Duration::from_micros(random.random_range(0..100_000)));
        if random.random_bool(0.7) {
            ended = disturb(&mut hosts, &mut random);
            std::thread::sleep(Duration::from_micros(random.random_range(0..11_000_000)));
        }
        writer.signal(Signal::KILL);
        let mut load = Load::new(seed);
        while let Some(line) = writer.next_line() {
            assert!(!line.contains("outcome"), "{what}: {line}");
            if line.starts_with("done ") && line.ends_with('\n') {
                let change = load.next();
                load.apply(&change);
            }
        }
        let config = config(&addresses(&hosts), path);
        match ReplicatedFile::open(&config) {
            Ok(file) => {
                check_found(&hosts, &file, &load, &what);
                file.close().unwrap();
            }
            Err(ReplicaError::MemberMissing { .. } | ReplicaError::InUse(_) | ReplicaError::NotFound(_)) => {}
            Err(error) => panic!("{what}: {error}"),
        }
        ended.into_iter().for_each(|index| hosts[index].go_on());
        let file = ReplicatedFile::open(&config).unwrap_or_else(|error| panic!("{what}: {error}"));
        check_found(&hosts, &file, &load, &what);
    }
}

/// A writer with appends in flight is killed, and exports are killed and stopped: what the next writer finds begins with what was
/// acknowledged, and has no gap.
fn no_append_is_lost_with_writers(path: PathChoice, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    for round in 0..rounds() {
        let (what, seed) = (format!("seed {seed}, round {round}"), random.random());
        let mut hosts = hosts(path);
        let mut writer = start_writer("create_and_append", &hosts, path, seed);
        writer.expect("open ");
        std::thread::sleep(Duration::from_micros(random.random_range(0..100_000)));
        let ended = if round % 2 == 1 { disturb(&mut hosts, &mut random) } else { Vec::new() };
        std::thread::sleep(Duration::from_micros(random.random_range(0..100_000)));
        writer.signal(Signal::KILL);
        let mut count = 0;
        while let Some(line) = writer.next_line() {
            assert!(!line.contains("outcome"), "{what}: {line}");
            count += u64::from(line.starts_with("done ") && line.ends_with('\n'));
        }
        ended.into_iter().for_each(|index| hosts[index].go_on());
        let config = config(&addresses(&hosts), path);
        let file = ReplicatedFile::open(&config).unwrap_or_else(|error| panic!("{what}: {error}"));
        let acknowledged: Vec<_> = (0..count).flat_map(|number| record(seed, number)).collect();
        let begun: Vec<_> = (0..count + IN_FLIGHT as u64).flat_map(|number| record(seed, number)).collect();
        let found = hosts[0].bytes();
        check_members(&hosts, &file.status(), &found, &what);
        assert!(found.starts_with(&acknowledged) && begun.starts_with(&found), "{what}, {count} records");
    }
}

#[test]
fn no_append_is_lost_with_writers_by_packets() {
    no_append_is_lost_with_writers(PathChoice::Udp, 5);
}

#[test]
fn no_append_is_lost_with_writers_within_the_host() {
    no_append_is_lost_with_writers(PathChoice::Local, 6);
}

/// Checks that all members have the same, and what was acknowledged.
fn check_found(hosts: &[Host], file: &ReplicatedFile, load: &Load, what: &str) {
    let status = file.status();
    let member = hosts.iter().find(|host| status.members.contains(&host.address)).unwrap();
    let bytes = member.bytes();
    check_members(hosts, &status, &bytes, what);
    assert!(load.permits(&bytes), "{what}: an acknowledged change is missing; {status:?}");
}

#[test]
fn no_write_is_lost_with_writers_by_packets() {
    no_write_is_lost_with_writers(PathChoice::Udp, 3);
}

#[test]
fn no_write_is_lost_with_writers_within_the_host() {
    no_write_is_lost_with_writers(PathChoice::Local, 4);
}

/// A call takes one timeout, however many exports are stopped at once.
#[test]
fn stopped_exports_cost_one_timeout_together() {
    let exports: Vec<Host> = (0..5).map(|_| Host::start(PathChoice::Udp)).collect();
    let config = config(&addresses(&exports), PathChoice::Udp);
    let mut file = ReplicatedFile::create(&config, 0o644).unwrap();
    file.append_commit(b"before").unwrap();
    // The write below is longer than what is in flight at a time, and has blocks.
    let long = vec![1; 10 << 20];
    file.write_at(0, &long).unwrap();
    let mut reader = ReplicatedFile::open_read(&config, false).unwrap();
    let nearest = file.status().members[0];
    let mut exports = exports;
    // All but one, the nearest among them.
    exports.sort_by_key(|host| host.address != nearest);
    exports[..4].iter_mut().for_each(|host| host.end(Signal::STOP));
    let begun = Instant::now();
    assert_eq!(file.read_at(0, &mut [0; 6]).unwrap(), 6);
    assert!(begun.elapsed() < less_than_timeouts(2), "{:?}", begun.elapsed());
    let begun = Instant::now();
    file.write_at(0, &long).unwrap();
    assert!(begun.elapsed() < less_than_timeouts(2), "{:?}", begun.elapsed());
    assert_eq!(file.status().members, [exports[4].address]);
    let begun = Instant::now();
    file.append_commit(b"later").unwrap();
    assert!(begun.elapsed() < TIMEOUT / 2, "a dropped member is asked again");
    let begun = Instant::now();
    assert_eq!(reader.read_at(0, &mut [0; 6]).unwrap(), 6);
    assert!(begun.elapsed() < less_than_timeouts(2), "{:?}", begun.elapsed());
}
