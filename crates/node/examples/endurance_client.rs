//! A client that reads and writes a range of a region at random and verifies all data, until its standard input ends.
//!
//! ```sh
//! endurance_client ADDRESS INSTANCE REGION FIRST_BYTE BYTES SEED [FAULT_PLAN]
//! ```
//!
//! No other client may use the range. The client fills it first, and then tracks its content. Each second it prints its
//! progress as `name=value`. `tests/endurance/` runs it.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use terrace_nic::{Buffer, WcStatus};
use terrace_node::{Client, ClientConfig, Region};

/// The bytes of a piece: not a multiple of the page size, so that most pieces straddle pages.
const PIECE_BYTES: usize = 50_008;
/// Accesses in flight.
const DEPTH: u64 = 8;
/// The pause between two polls, which limits the load.
const PAUSE: Duration = Duration::from_millis(1);
const REPORT: Duration = Duration::from_secs(1);

struct Access {
    piece: usize,
    /// The version being written; `None` for a read.
    version: Option<u64>,
    /// The offset of the bytes within the piece, in words.
    first: usize,
    words: usize,
    since: Instant,
}

struct Load<'a> {
    region: Region<'a>,
    first_byte: u64,
    buffers: Vec<Buffer>,
    versions: Vec<u64>,
    next_version: u64,
    in_flight: HashMap<u64, Access>,
    random: u64,
    ops: u64,
    bytes: u64,
    wrong: u64,
    slowest: Duration,
}

impl Load<'_> {
    /// A random number by xorshift.
    fn below(&mut self, limit: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % limit as u64) as usize
    }

    fn word(piece: usize, version: u64) -> u64 {
        (piece as u64) << 48 | version
    }

    fn begin(&mut self, tag: u64, piece: usize, writes: bool) -> Result<(), Box<dyn std::error::Error>> {
        let words = PIECE_BYTES / 8;
        let first = if writes { 0 } else { self.below(words) };
        let count = if writes { words } else { 1 + self.below(words - first) };
        let offset = self.first_byte + (piece * PIECE_BYTES + first * 8) as u64;
        let (buffer, len) = (&self.buffers[tag as usize], (count * 8) as u32);
        let version = writes.then(|| {
            self.next_version += 1;
            self.next_version
        });
        match version {
            Some(version) => {
                buffer.write(0, &Load::word(piece, version).to_ne_bytes().repeat(words))?;
                self.region.write(offset, buffer, 0, len, tag)?;
            }
            None => self.region.read(offset, buffer, 0, len, tag)?,
        }
        self.in_flight.insert(tag, Access { piece, version, first, words: count, since: Instant::now() });
        Ok(())
    }

    /// Verifies a completed read, or records the version of a completed write.
    fn complete(&mut self, tag: u64) -> Result<(), Box<dyn std::error::Error>> {
        let access = self.in_flight.remove(&tag).ok_or("a completion of no access")?;
        let len = access.words * 8;
        self.slowest = self.slowest.max(access.since.elapsed());
        self.ops += 1;
        self.bytes += len as u64;
        let Some(version) = access.version else {
            let mut found = vec![0; len];
            self.buffers[tag as usize].read(0, &mut found)?;
            let expected =
                Load::word(access.piece, self.versions[access.piece]).to_ne_bytes().repeat(access.words);
            if found != expected {
                let at = found.iter().zip(&expected).position(|(found, expected)| found != expected);
                eprintln!("endurance_client: piece {}, word {}: wrong at {at:?}", access.piece, access.first);
                self.wrong += 1;
            }
            return Ok(());
        };
        self.versions[access.piece] = version;
        Ok(())
    }

    /// A piece without an access in flight.
    fn free_piece(&mut self) -> usize {
        loop {
            let piece = self.below(self.versions.len());
            if !self.in_flight.values().any(|access| access.piece == piece) {
                return piece;
            }
        }
    }

    fn report(&self) -> std::io::Result<()> {
        let oldest = self.in_flight.values().map(|access| access.since.elapsed()).max().unwrap_or_default();
        let line = format!(
            "ops={} bytes={} wrong={} slowest_ms={} oldest_ms={}\n",
            self.ops,
            self.bytes,
            self.wrong,
            self.slowest.as_millis(),
            oldest.as_millis()
        );
        std::io::stdout().write_all(line.as_bytes())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [address, instance, name, first_byte, bytes, seed, plan @ ..] = &args[..] else {
        return Err(
            "usage: endurance_client ADDRESS INSTANCE REGION FIRST_BYTE BYTES SEED [FAULT_PLAN]".into()
        );
    };
    let mut config = ClientConfig { instance: instance.parse()?, ..ClientConfig::new(address.parse()?) };
    config.port.fault_plan = plan.first().map(Into::into);
    let client = Client::connect(&config)?;
    let seed: u64 = seed.parse()?;
    let mut load = Load {
        region: client.open(name)?,
        first_byte: first_byte.parse()?,
        buffers: (0..DEPTH).map(|_| client.buffer(PIECE_BYTES)).collect::<Result<_, _>>()?,
        versions: vec![0; bytes.parse::<usize>()? / PIECE_BYTES],
        next_version: (seed & 0xffff) << 32,
        in_flight: HashMap::new(),
        random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        ops: 0,
        bytes: 0,
        wrong: 0,
        slowest: Duration::ZERO,
    };
    let stop = Arc::new(AtomicBool::new(false));
    let stop_at_eof = stop.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        stop_at_eof.store(true, Ordering::Relaxed);
    });
    let (mut filled, mut reported, mut done) = (0, Instant::now(), Vec::new());
    loop {
        let stopping = stop.load(Ordering::Relaxed);
        for tag in (0..DEPTH).filter(|_| !stopping) {
            if load.in_flight.contains_key(&tag) {
                continue;
            }
            // The first accesses write every piece once.
            if filled < load.versions.len() {
                load.begin(tag, filled, true)?;
                filled += 1;
            } else if load.versions.iter().all(|version| *version != 0) {
                let (piece, writes) = (load.free_piece(), load.below(3) == 0);
                load.begin(tag, piece, writes)?;
            }
        }
        client.poll(&mut done)?;
        for completion in done.drain(..) {
            if completion.status != WcStatus::Success {
                return Err(format!("an access ended with {:?}", completion.status).into());
            }
            load.complete(completion.tag)?;
        }
        if reported.elapsed() > REPORT || (stopping && load.in_flight.is_empty()) {
            load.report()?;
            reported = Instant::now();
        }
        if stopping && load.in_flight.is_empty() {
            return Ok(());
        }
        std::thread::sleep(PAUSE);
    }
}
