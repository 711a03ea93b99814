//! Accesses to an export for `bench/filemr`, timed one by one or by their rate: `turns ADDRESS:PORT auto|udp|local`. Reads a
//! command a line, and prints a JSON object for each.
//!
//! | command | is |
//! |---|---|
//! | `write COUNT` | one-sided WRITEs of 1 KiB at random offsets, each followed by a commit |
//! | `message COUNT` | the same by two requests: one that writes, one that makes the file persistent |
//! | `append BYTES COUNT` | records of a log, each persistent |
//! | `append_late BYTES COUNT` | records of a log that nobody makes persistent |
//! | `read BYTES DEPTH` | the rate of READs at random offsets, by calls if the depth is 1, and by a pipeline if it is more; words of them are compared |
//! | `store BYTES DEPTH` | the same of WRITEs |
//! | `record BYTES DEPTH` | the same of APPENDs to a file |

use std::error::Error;
use std::io::BufRead;
use std::time::{Duration, Instant};

use terrace_export::{Client, ClientConfig, Completed, ExportError, OpenAccess, Pipeline, RemoteFile};
use terrace_log::RemoteLog;

const FILE_BYTES: u64 = 64 << 20;
const WRITE_BYTES: usize = 1 << 10;
/// The time of a turn that measures a rate.
const TURN: Duration = Duration::from_millis(100);
/// The most time for one access.
const ACCESS_MAX: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [server, path] = &arguments[..] else {
        return Err("usage: turns ADDRESS:PORT auto|udp|local".into());
    };
    let mut config = ClientConfig::new(server.parse()?);
    config.port.path = path.parse()?;
    let turns = Turns::new(Client::connect(&config)?, path)?;
    println!("{{}}");
    for line in std::io::stdin().lock().lines() {
        println!("{}", turns.run(&line?)?);
    }
    Ok(())
}

struct Turns {
    client: Client,
    file: RemoteFile,
    /// The same bytes are wherever the offset is the same: those of [`word_at`].
    known: RemoteFile,
    records: RemoteFile,
    log: RemoteLog,
}

/// What a turn that measures a rate does.
#[derive(Clone, Copy)]
enum Operation {
    Read,
    Store,
    Record,
}

/// When a step of an operation ends.
type Steps = [Instant; 3];

impl Turns {
    /// Files of [`FILE_BYTES`], an empty one, and a log, with names of their own.
    fn new(client: Client, name: &str) -> Result<Turns, Box<dyn Error>> {
        let access = OpenAccess::READ | OpenAccess::WRITE;
        let file = client.create(client.root(), format!("{name}.data").as_ref(), 0o644, access, true)?;
        let block = vec![1; 1 << 20];
        for offset in (0..FILE_BYTES).step_by(block.len()) {
            file.write_at(offset, &block)?;
        }
        file.commit()?;
        let known = client.create(client.root(), format!("{name}.known").as_ref(), 0o644, access, true)?;
        for offset in (0..FILE_BYTES).step_by(block.len()) {
            let words: Vec<u8> = (offset..offset + block.len() as u64).step_by(8).flat_map(word_at).collect();
            known.write_at(offset, &words)?;
        }
        let records =
            client.create(client.root(), format!("{name}.records").as_ref(), 0o644, access, true)?;
        let log = RemoteLog::create(&client, client.root(), format!("{name}.log").as_ref())?;
        Ok(Turns { client, file, known, records, log })
    }

    fn run(&self, command: &str) -> Result<String, Box<dyn Error>> {
        let words: Vec<&str> = command.split_whitespace().collect();
        match words[..] {
            ["write", count] => repeat(count, || {
                self.write(|offset, data| self.file.write_at(offset, data), || self.file.commit())
            }),
            ["message", count] => repeat(count, || {
                self.write(
                    |offset, data| self.file.write_by_message(offset, data),
                    || self.client.sync(self.file.id()),
                )
            }),
            ["append", bytes, count] => {
                let record = vec![2; bytes.parse()?];
                repeat(count, || whole(|| self.log.append_commit(&record)))
            }
            ["append_late", bytes, count] => {
                let record = vec![2; bytes.parse()?];
                repeat(count, || whole(|| self.log.append(&record)))
            }
            ["read", bytes, depth] => self.rate(Operation::Read, bytes, depth),
            ["store", bytes, depth] => self.rate(Operation::Store, bytes, depth),
            ["record", bytes, depth] => {
                let rate = self.rate(Operation::Record, bytes, depth)?;
                self.records.truncate(0)?;
                Ok(rate)
            }
            _ => Err(format!("unknown command: {command}").into()),
        }
    }

    fn rate(&self, operation: Operation, bytes: &str, depth: &str) -> Result<String, Box<dyn Error>> {
        let (bytes, depth) = (bytes.parse::<usize>()?.max(8), depth.parse::<usize>()?);
        let begin = Instant::now();
        let count = match depth {
            1 => self.call_for(operation, bytes, begin + TURN)?,
            _ => self.pipeline_for(operation, bytes, depth, begin + TURN)?,
        };
        Ok(format!(r#"{{"per_s": {:.0}}}"#, count as f64 / begin.elapsed().as_secs_f64()))
    }

    /// Accesses by calls until then. Returns their number.
    fn call_for(&self, operation: Operation, bytes: usize, until: Instant) -> Result<u64, Box<dyn Error>> {
        let (mut buffer, mut count) = (vec![4; bytes], 0);
        // The clock takes as long as a part of an access.
        while count % 16 != 0 || Instant::now() < until {
            let offset = random_offset(bytes);
            match operation {
                Operation::Read => {
                    self.known.read_at(offset, &mut buffer)?;
                    check(offset, &buffer)?;
                }
                Operation::Store => self.file.write_at(offset, &buffer)?,
                Operation::Record => drop(self.records.append(&buffer)?),
            }
            count += 1;
        }
        Ok(count)
    }

    /// So many accesses at a time until then. Returns their number.
    fn pipeline_for(
        &self,
        operation: Operation,
        bytes: usize,
        depth: usize,
        until: Instant,
    ) -> Result<u64, Box<dyn Error>> {
        let mut pipeline = self.client.pipeline(depth, bytes)?;
        let data = vec![4; bytes];
        let begin = |pipeline: &mut Pipeline| -> Result<(), ExportError> {
            let offset = random_offset(bytes);
            match operation {
                Operation::Read => pipeline.read(&self.known, offset, bytes, offset),
                Operation::Store => pipeline.write(&self.file, offset, &data, offset),
                Operation::Record => pipeline.append(&self.records, &data, false, offset),
            }
        };
        for _ in 0..depth {
            begin(&mut pipeline)?;
        }
        let (mut done, mut count) = (Vec::new(), 0);
        while pipeline.in_flight() > 0 {
            if pipeline.wait(&mut done, ACCESS_MAX) == 0 {
                return Err("an access does not end".into());
            }
            let goes_on = Instant::now() < until;
            for completion in done.drain(..) {
                if let Completed::Read(read) = completion.result? {
                    check(completion.tag, &read)?;
                }
                count += 1;
                if goes_on {
                    begin(&mut pipeline)?;
                }
            }
        }
        Ok(count)
    }

    fn write<E: Into<Box<dyn Error>>>(
        &self,
        write: impl FnOnce(u64, &[u8]) -> Result<(), E>,
        commit: impl FnOnce() -> Result<(), E>,
    ) -> Result<Steps, Box<dyn Error>> {
        let offset = rand::random_range(0..FILE_BYTES / WRITE_BYTES as u64) * WRITE_BYTES as u64;
        let begin = Instant::now();
        write(offset, &[3; WRITE_BYTES]).map_err(Into::into)?;
        let written = Instant::now();
        commit().map_err(Into::into)?;
        Ok([begin, written, Instant::now()])
    }
}

/// The bytes of a known file at a multiple of 8.
fn word_at(offset: u64) -> [u8; 8] {
    (offset + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

/// A multiple of `bytes` in a file.
fn random_offset(bytes: usize) -> u64 {
    rand::random_range(0..FILE_BYTES / bytes as u64) * bytes as u64
}

/// Compares the first and the last word of a READ.
fn check(offset: u64, read: &[u8]) -> Result<(), Box<dyn Error>> {
    let last = read.len() - 8;
    match read[..8] == word_at(offset) && read[last..] == word_at(offset + last as u64) {
        true => Ok(()),
        false => Err("a READ got wrong bytes".into()),
    }
}

fn whole<T, E: Into<Box<dyn Error>>>(act: impl FnOnce() -> Result<T, E>) -> Result<Steps, Box<dyn Error>> {
    let begin = Instant::now();
    act().map_err(Into::into)?;
    let end = Instant::now();
    Ok([begin, end, end])
}

/// Calls `act` so often. Returns the medians of its steps and of all, and the 99th percentile, in microseconds.
fn repeat(
    count: &str,
    mut act: impl FnMut() -> Result<Steps, Box<dyn Error>>,
) -> Result<String, Box<dyn Error>> {
    let (mut first, mut second, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..count.parse::<usize>()?.max(1) {
        let [begin, written, end] = act()?;
        first.push((written - begin).as_secs_f64() * 1e6);
        second.push((end - written).as_secs_f64() * 1e6);
        all.push((end - begin).as_secs_f64() * 1e6);
    }
    for values in [&mut first, &mut second, &mut all] {
        values.sort_by(f64::total_cmp);
    }
    let (middle, tail) = (all.len() / 2, all.len() * 99 / 100);
    Ok(format!(
        r#"{{"write_us": {:.2}, "commit_us": {:.2}, "us": {:.2}, "p99_us": {:.2}}}"#,
        first[middle], second[middle], all[middle], all[tail]
    ))
}
