//! Writes and appends to an export, timed one by one, for `bench/filemr/latency.py`: `turns ADDRESS:PORT auto|udp|local`. Reads a
//! command a line, and prints a JSON object for each.
//!
//! | command | is |
//! |---|---|
//! | `write COUNT` | one-sided WRITEs of 1 KiB at random offsets, each followed by a commit |
//! | `message COUNT` | the same by two requests: one that writes, one that makes the file persistent |
//! | `append BYTES COUNT` | records of a log, each persistent |
//! | `append_late BYTES COUNT` | records of a log that nobody makes persistent |

use std::error::Error;
use std::io::BufRead;
use std::time::Instant;

use terrace_export::{Client, ClientConfig, OpenAccess, RemoteFile};
use terrace_log::RemoteLog;

const FILE_BYTES: u64 = 64 << 20;
const WRITE_BYTES: usize = 1 << 10;

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
    log: RemoteLog,
}

/// When a step of an operation ends.
type Steps = [Instant; 3];

impl Turns {
    /// A file of [`FILE_BYTES`] and a log, with names of their own.
    fn new(client: Client, name: &str) -> Result<Turns, Box<dyn Error>> {
        let access = OpenAccess::READ | OpenAccess::WRITE;
        let file = client.create(client.root(), format!("{name}.data").as_ref(), 0o644, access, true)?;
        let block = vec![1; 1 << 20];
        for offset in (0..FILE_BYTES).step_by(block.len()) {
            file.write_at(offset, &block)?;
        }
        file.commit()?;
        let log = RemoteLog::create(&client, client.root(), format!("{name}.log").as_ref())?;
        Ok(Turns { client, file, log })
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
            _ => Err(format!("unknown command: {command}").into()),
        }
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
