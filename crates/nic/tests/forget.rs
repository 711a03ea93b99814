//! Same-host peers find regions, and drop their mappings of deregistered ones, also when messages are received slowly.

mod common;
#[path = "common/shared.rs"]
mod shared;

use common::*;
use shared::{SharedRegion, register};
use terrace_nic::Mr;

/// More messages than a socket holds, one for each region.
const REGIONS: u64 = 600;
const LEN: u64 = 4096;

/// How often this process, with both of its devices, maps the file behind an address.
fn mappings_of_file_at(addr: u64) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("one's own mappings");
    let name = |line: &str| line.split_whitespace().nth(5).map(str::to_owned);
    let at_addr = maps.lines().find(|line| line.starts_with(&format!("{addr:x}-"))).expect("it is mapped");
    maps.lines().filter(|line| name(line) == name(at_addr)).count()
}

#[test]
fn a_question_that_does_not_fit_into_the_socket_is_asked_later() {
    let (a, b) = (Node::local(), Node::local());
    let (qa, _qb) = rc_pair(&a, &b);
    let read = |mr: &Mr| qa.read_now(mr.rkey(), mr.addr(), &mut [0; 8]).expect("a queue pair");
    wait_until("the peer is found", || read(&b.mr));
    let regions: Vec<_> = (0..REGIONS).map(|number| register(&b, b.memory.addr() + 8 * number, 8)).collect();
    // Nobody reads the questions.
    let pause = b.device.park_for_fork().lock();
    regions.iter().for_each(|mr| assert!(!read(mr)));
    // Time to send as many as the socket holds.
    std::thread::sleep(std::time::Duration::from_millis(50));
    pause.resume_in_parent();
    // The queue pair has asked for this one last, and does not ask again.
    wait_until("the last one is reached without packets", || read(&regions[REGIONS as usize - 1]));
}

#[test]
fn a_peer_that_does_not_read_its_socket_later_gets_every_forget_message() {
    let (a, b) = (Node::local(), Node::local());
    let (qa, _qb) = rc_pair(&a, &b);
    let SharedRegion { addr, mr: whole } = SharedRegion::new(&b, (REGIONS * LEN) as usize);
    let parts = (1..REGIONS).map(|number| register(&b, addr + number * LEN, LEN));
    let regions: Vec<_> = [whole].into_iter().chain(parts).collect();
    for mr in &regions {
        wait_until("it is reached without packets", || {
            qa.read_now(mr.rkey(), mr.addr(), &mut [0; 8]).expect("a queue pair")
        });
    }
    let is_mapped = || mappings_of_file_at(addr);
    assert_eq!(is_mapped(), 1 + REGIONS as usize);
    // The engine that would receive the notices rests, as in a stopped process.
    let pause = a.device.park_for_fork().lock();
    regions.iter().for_each(|mr| mr.dereg().expect("nobody is waited for"));
    // Time to send as many notices as the socket holds.
    std::thread::sleep(std::time::Duration::from_millis(50));
    pause.resume_in_parent();
    wait_until("everything is given up", || is_mapped() == 1);
    // Both devices work as before.
    let mr = register(&b, addr, LEN);
    wait_until("a new one is reached without packets", || {
        qa.read_now(mr.rkey(), mr.addr(), &mut [0; 8]).expect("a queue pair")
    });
}
