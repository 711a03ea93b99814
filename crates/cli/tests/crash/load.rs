//! The load: two clients that write and commit continuously.

use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use terrace_nic::{Buffer, WcStatus};
use terrace_node::{Client, ClientError, Region};

use super::model::{Commit, Model};
use super::node::REGION;
use super::{MIB, REGION_BYTES};

const LEN_MAX: usize = 256 << 10;
/// The accesses in flight of a client.
const SLOTS: usize = 12;
/// The slots for long accesses. With long accesses in every slot, soon all accesses in flight would be long.
const LONG_SLOTS: usize = 3;
/// Half of the writes go to this prefix, so that units become resident.
const HOT_BYTES: usize = 2 * MIB;
/// The time limit for an access, which includes other load on the disk.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The time to receive answers that a killed node had sent.
const DRAIN: Duration = Duration::from_millis(20);

/// The purpose of an access.
enum Purpose {
    Write { number: usize, range: Range<usize> },
    Commit(Commit),
}

/// A client with its buffers.
struct Writer<'a> {
    client: &'a Client,
    region: Region<'a>,
    buffers: Vec<Buffer>,
    /// The accesses in flight by slot, which is the tag.
    in_flight: HashMap<usize, Purpose>,
}

pub struct Load<'a> {
    random: StdRng,
    writers: [Writer<'a>; 2],
}

impl<'a> Load<'a> {
    pub fn new(clients: &'a [Client; 2], seed: u64) -> Load<'a> {
        let writer = |client: &'a Client| {
            let region = client.open(REGION).expect("the region");
            let buffers = (0..SLOTS).map(|_| client.buffer(LEN_MAX).expect("a buffer")).collect();
            Writer { client, region, buffers, in_flight: HashMap::new() }
        };
        Load { random: StdRng::seed_from_u64(seed), writers: clients.each_ref().map(writer) }
    }

    /// Makes the whole region durable.
    pub fn commit_all(&mut self, model: &mut Model) {
        let Writer { client, region, .. } = &self.writers[0];
        region.commit(0, REGION_BYTES as u32, 0).expect("begun");
        wait_for(client, 1);
        model.make_all_durable();
    }

    /// Reads the whole region.
    pub fn read_all(&mut self) -> Vec<u8> {
        let Writer { client, region, buffers, .. } = &self.writers[0];
        let mut image = vec![0; REGION_BYTES];
        for (batch, chunks) in image.chunks_mut(SLOTS * LEN_MAX).enumerate() {
            let chunks: Vec<&mut [u8]> = chunks.chunks_mut(LEN_MAX).collect();
            for (slot, chunk) in chunks.iter().enumerate() {
                let offset = ((batch * SLOTS + slot) * LEN_MAX) as u64;
                region.read(offset, &buffers[slot], 0, chunk.len() as u32, slot as u64).expect("begun");
            }
            wait_for(client, chunks.len());
            for (slot, chunk) in chunks.into_iter().enumerate() {
                buffers[slot].read(0, chunk).expect("within");
            }
        }
        image
    }

    /// Writes and commits until the node has died.
    pub fn run(&mut self, model: &mut Model, is_dead: impl Fn() -> bool) {
        let mut last_end = Instant::now();
        while !is_dead() {
            for writer in 0..self.writers.len() {
                if let Err(error) = self.fill(writer, model) {
                    // The node may have died since the last check.
                    return assert!(wait_until(&is_dead), "{error}");
                }
                match self.collect(writer, model) {
                    Ok(0) => {}
                    Ok(_) => last_end = Instant::now(),
                    Err(failure) => return assert!(wait_until(&is_dead), "{failure}"),
                }
            }
            assert!(last_end.elapsed() < TIMEOUT, "the node does not answer");
        }
    }

    /// Receives the last answers of a killed node.
    pub fn drain(mut self, model: &mut Model) {
        let started = Instant::now();
        while started.elapsed() < DRAIN {
            for writer in 0..self.writers.len() {
                // Failures are expected now.
                let _ = self.collect(writer, model);
            }
        }
    }

    /// Starts accesses in all free slots of a writer.
    fn fill(&mut self, writer: usize, model: &mut Model) -> Result<(), ClientError> {
        for slot in 0..SLOTS {
            if self.writers[writer].in_flight.contains_key(&slot) {
                continue;
            }
            let range = self.pick(slot < LONG_SLOTS);
            // The order of overlapping writes of two clients is undefined.
            let overlaps = |purpose: &Purpose| match purpose {
                Purpose::Write { range: other, .. } => other.start < range.end && range.start < other.end,
                Purpose::Commit(_) => false,
            };
            if self.writers[1 - writer].in_flight.values().any(overlaps) {
                continue;
            }
            let is_commit = self.random.random_range(0..40) == 0;
            let Writer { region, buffers, in_flight, .. } = &mut self.writers[writer];
            if is_commit {
                let len = if self.random.random() { range.len() } else { REGION_BYTES - range.start };
                let commit = model.begin_commit(range.start..range.start + len);
                region.commit(range.start as u64, len as u32, slot as u64)?;
                in_flight.insert(slot, Purpose::Commit(commit));
                continue;
            }
            let mut data = vec![0; range.len()];
            self.random.fill_bytes(&mut data);
            buffers[slot].write(0, &data).expect("within");
            // The write may take effect even if the call fails.
            let number = model.begin(range.clone(), data);
            region.write(range.start as u64, &buffers[slot], 0, range.len() as u32, slot as u64)?;
            in_flight.insert(slot, Purpose::Write { number, range });
        }
        Ok(())
    }

    /// Takes completions and updates the model. Returns their count, or the failure.
    fn collect(&mut self, writer: usize, model: &mut Model) -> Result<usize, String> {
        let Writer { client, in_flight, .. } = &mut self.writers[writer];
        let mut done = Vec::new();
        client.poll(&mut done).map_err(|error| error.to_string())?;
        for completion in &done {
            let purpose = in_flight.remove(&(completion.tag as usize)).expect("it is in flight");
            if completion.status != WcStatus::Success {
                return Err(format!("{completion:?}"));
            }
            match purpose {
                Purpose::Write { number, .. } => model.acknowledge(number),
                Purpose::Commit(commit) => model.acknowledge_commit(&commit),
            }
        }
        Ok(done.len())
    }

    /// A random range of 1 B to 256 KiB: many are short, some are aligned to pages.
    fn pick(&mut self, may_be_long: bool) -> Range<usize> {
        let len_max = [16, 600, 4096, 20_000][self.random.random_range(0..4)];
        let mut len = self.random.random_range(1..=if may_be_long { LEN_MAX } else { len_max });
        let area = if self.random.random() { HOT_BYTES } else { REGION_BYTES };
        let mut start = self.random.random_range(0..=area - len);
        if self.random.random_range(0..3) == 0 {
            start -= start % 4096;
            len = len.next_multiple_of(4096);
        }
        start..start + len
    }
}

fn wait_until(is_dead: impl Fn() -> bool) -> bool {
    let started = Instant::now();
    while !is_dead() && started.elapsed() < Duration::from_secs(2) {
        std::thread::yield_now();
    }
    is_dead()
}

fn wait_for(client: &Client, count: usize) {
    let (mut done, started) = (Vec::new(), Instant::now());
    while done.len() < count {
        client.poll(&mut done).expect("a healthy connection");
        assert!(started.elapsed() < TIMEOUT, "{} of {count} answers", done.len());
    }
    assert!(done.iter().all(|one| one.status == WcStatus::Success), "{done:?}");
}
