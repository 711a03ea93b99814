//! Clients are killed, and another one continues.

use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_nic::{Buffer, WcStatus};
use terrace_node::{Client, Region};

use super::disk::{Disk, Storage};
use super::node::{Frames, Node, REGION, address, connect};
use super::{REGION_BYTES, seed};

/// The environment variable of the process to be killed: the node's address and instance index, a seed, and the round.
const CHILD: &str = "TERRACE_CRASH_CLIENT";
/// The bytes of a slot. Not a divisor of the page size, so that most slots straddle pages.
const SLOT_BYTES: usize = 100_008;
const SLOTS: usize = 120;
/// Outstanding requests of the client when it is killed.
const DEPTH: usize = 16;
/// The time limit for an access of the surviving client.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The content of a slot: one number, made of the slot's index and a version.
fn content(slot: usize, version: u64) -> Vec<u8> {
    ((slot as u64) << 48 | version).to_ne_bytes().repeat(SLOT_BYTES / 8)
}

/// Writes and reads until the process is killed. Prints each acknowledged write as a line `slot version`.
pub fn write_until_killed() {
    let Ok(child) = std::env::var(CHILD) else { return };
    let fields: Vec<&str> = child.split(' ').collect();
    let [address, instance, seed, round] = fields[..] else { panic!("{CHILD}={child}") };
    let address: IpAddr = address.parse().expect("an address");
    let client = connect(address, instance.parse().expect("an instance index"));
    let region = client.open(REGION).expect("the region");
    let buffers: Vec<Buffer> = (0..DEPTH * 2).map(|_| client.buffer(SLOT_BYTES).expect("a buffer")).collect();
    let mut random = StdRng::seed_from_u64(seed.parse().expect("a seed"));
    let mut version = round.parse::<u64>().expect("a round") << 32;
    // Slot and version by tag. Even tags are writes.
    let mut in_flight: Vec<Option<(usize, u64)>> = vec![None; DEPTH * 2];
    let mut done = Vec::new();
    loop {
        for tag in 0..in_flight.len() {
            let slot = random.random_range(0..SLOTS);
            let is_taken = in_flight.iter().step_by(2).flatten().any(|(other, _)| *other == slot);
            if in_flight[tag].is_some() || is_taken {
                continue;
            }
            let (offset, buffer, len) = ((slot * SLOT_BYTES) as u64, &buffers[tag], SLOT_BYTES as u32);
            if tag % 2 == 0 {
                version += 1;
                buffer.write(0, &content(slot, version)).expect("within");
                region.write(offset, buffer, 0, len, tag as u64).expect("begun");
            } else {
                region.read(offset, buffer, 0, len, tag as u64).expect("begun");
            }
            in_flight[tag] = Some((slot, version));
        }
        client.poll(&mut done).expect("a healthy connection");
        for completion in done.drain(..) {
            assert_eq!(completion.status, WcStatus::Success);
            let (slot, version) = in_flight[completion.tag as usize].take().expect("it is in flight");
            if completion.tag % 2 == 0 {
                let line = format!("{slot} {version}\n");
                std::io::stdout().write_all(line.as_bytes()).expect("the parent reads");
            }
        }
    }
}

/// A client in its own process, which is killed when this is dropped.
struct Victim {
    process: Child,
    acknowledged: Receiver<(usize, u64)>,
}

impl Victim {
    fn start(node: &Node, seed: u64, round: u64) -> Victim {
        let mut process = Command::new(std::env::current_exe().expect("it runs"))
            .args(["--exact", "child", "--nocapture"])
            .env(CHILD, format!("{} {} {seed} {round}", address(), node.instance))
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let lines = BufReader::new(process.stdout.take().expect("it is piped")).lines();
        let (sender, acknowledged) = channel();
        std::thread::spawn(move || {
            // The test harness prints other lines, and the last line may be truncated.
            let parse = |line: String| {
                let (slot, version) = line.split_once(' ')?;
                Some((slot.parse().ok()?, version.parse().ok()?))
            };
            let parsed = lines.map_while(Result::ok).filter_map(parse);
            parsed.take_while(|one| sender.send(*one).is_ok()).for_each(drop);
        });
        Victim { process, acknowledged }
    }

    /// Waits until a write was acknowledged.
    fn wait_for_write(&self) -> (usize, u64) {
        self.acknowledged.recv().expect("the client writes")
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The client that survives.
struct Survivor<'a> {
    client: &'a Client,
    region: Region<'a>,
    buffer: Buffer,
}

impl Survivor<'_> {
    fn wait(&self) {
        let (mut done, started) = (Vec::new(), Instant::now());
        while done.is_empty() {
            self.client.poll(&mut done).expect("a healthy connection");
            assert!(started.elapsed() < TIMEOUT, "the node does not answer");
        }
        assert_eq!(done[0].status, WcStatus::Success);
    }

    fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        self.region.read(offset as u64, &self.buffer, 0, len as u32, 1).expect("begun");
        self.wait();
        let mut out = vec![0; len];
        self.buffer.read(0, &mut out).expect("within");
        out
    }

    /// Writes a range that no other client accesses, and reads it back.
    fn write_and_read_back(&self, byte: u8) {
        let (offset, len) = (SLOTS * SLOT_BYTES + 77 * usize::from(byte), 50_000);
        self.buffer.write(0, &vec![byte; len]).expect("within");
        self.region.write(offset as u64, &self.buffer, 0, len as u32, 1).expect("begun");
        self.wait();
        assert!(self.read(offset, len) == vec![byte; len]);
    }
}

/// Checks that every slot has a version that a client of this round or an earlier one wrote, and that no acknowledged
/// write is missing.
fn check_slots(survivor: &Survivor<'_>, acknowledged: &[u64], round: u64) {
    for (slot, version) in acknowledged.iter().enumerate() {
        let found = survivor.read(slot * SLOT_BYTES, SLOT_BYTES);
        for word in found.chunks(8) {
            let word = u64::from_ne_bytes(word.try_into().expect("8 bytes"));
            let (index, found) = ((word >> 48) as usize, word & ((1 << 48) - 1));
            let is_known = word == 0 || (index == slot && found >> 32 <= round);
            assert!(
                is_known && found >= *version,
                "slot {slot} in round {round} of seed {}: {word:#x}, {version:#x} was acknowledged",
                seed()
            );
        }
    }
}

/// Kills one client per round.
pub fn kill_clients(rounds: u64) {
    const { assert!(SLOTS * SLOT_BYTES + 256 * 77 + 50_000 < REGION_BYTES) };
    let disk = Disk::new(Storage::File, REGION_BYTES as u64);
    let frames = Frames::new();
    let mut node = Node::start(&disk.region(), &frames);
    let client = node.connect();
    let region = client.open(REGION).expect("the region");
    let survivor = Survivor { client: &client, region, buffer: client.buffer(SLOT_BYTES).expect("a buffer") };
    let mut random = StdRng::seed_from_u64(seed());
    let mut acknowledged = vec![0; SLOTS];
    let mut count = 0;
    for round in 1..=rounds {
        let mut victim = Victim::start(&node, random.random(), round);
        let first = victim.wait_for_write();
        let delay = Duration::from_micros(random.random_range(0..60_000));
        let started = Instant::now();
        while started.elapsed() < delay {
            survivor.write_and_read_back(round as u8);
        }
        victim.process.kill().expect("it is a child");
        victim.process.wait().expect("it is a child");
        for (slot, version) in std::iter::once(first).chain(victim.acknowledged.iter()) {
            acknowledged[slot] = version;
            count += 1;
        }
        survivor.write_and_read_back(!(round as u8));
        check_slots(&survivor, &acknowledged, round);
        assert!(node.is_alive());
    }
    println!("{rounds} clients died, after {count} acknowledged writes");
    assert!(count > rounds as usize, "{count}");
}
