//! Latency and rate of loads, stores and invalidations beside one-sided READs and WRITEs of 4 KiB to the same process, and the
//! processor time of that process by thread. `rates [udp|local] [SCHEME]`, with `udp` and `odrp` by default; the node's
//! chains access its own memory without packets in both cases. Thread `memory-rpc` is the node's processor under a baseline.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_far_memory::{
    Client, ClientConfig, MemoryNode, NodeConfig, PAGE_BYTES, PageBuffer, Request, Scheme,
};
use terrace_nic::{Buffer, PathChoice, PortConfig, WcStatus};
use terrace_node::{RegionConfig, ServeMode, Server, ServerConfig};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const PAGES: u64 = 8192;
const DEPTH: usize = 32;
const DURATION: Duration = Duration::from_millis(1500);
/// Clock ticks of a second in `/proc`.
const TICKS_PER_SECOND: f64 = 100.0;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let first = arguments.next().unwrap_or("udp".into());
    let scheme = arguments.next().as_deref().unwrap_or("odrp").parse()?;
    match first.as_str() {
        "node" => serve(scheme),
        path => measure(path.parse()?, scheme),
    }
}

/// A memory node and a region in memory, until standard input ends.
fn serve(scheme: Scheme) -> Result<()> {
    let config = NodeConfig::new(2 * PAGES * PAGE_BYTES as u64, (LOOPBACK, 0).into());
    let node = MemoryNode::open(&NodeConfig { scheme, ..config })?;
    let path = std::env::temp_dir().join(format!("terrace-rates-{}", std::process::id()));
    let size = PAGES * PAGE_BYTES as u64;
    let region = RegionConfig { name: "pages".into(), path: path.clone(), size: Some(size) };
    let port = PortConfig { address: Some(LOOPBACK), ..PortConfig::default() };
    let server = Server::open(&ServerConfig {
        regions: vec![region],
        dram_bytes: size,
        mode: ServeMode::Pin,
        port,
        threads: 1,
        frames_directory: None,
        keeps_frames: false,
    })?;
    println!("{} {}", node.listens_at(), server.device().instance());
    std::io::stdout().flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    std::fs::remove_file(path)?;
    Ok(())
}

/// Processor time of a process's threads in seconds, by name.
fn thread_times(process: &Child) -> Result<BTreeMap<String, f64>> {
    let mut times = BTreeMap::new();
    for thread in std::fs::read_dir(format!("/proc/{}/task", process.id()))? {
        let stat = std::fs::read_to_string(thread?.path().join("stat"))?;
        let (head, tail) = stat.rsplit_once(") ").ok_or("no stat")?;
        let name = head.split_once('(').map_or("", |(_, name)| name);
        let ticks =
            tail.split(' ').skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>();
        *times.entry(name.to_owned()).or_default() += ticks / TICKS_PER_SECOND;
    }
    Ok(times)
}

/// Something that has operations in flight.
trait Load {
    /// Begins operations on pages, each with a slot.
    fn begin(&mut self, operations: &[(u64, usize)]) -> Result<()>;
    /// Ended operations, by slot.
    fn poll(&mut self, ended: &mut Vec<usize>) -> Result<()>;
}

struct Far<'a> {
    client: &'a Client,
    buffer: Arc<PageBuffer>,
    request: fn(u64, (Arc<PageBuffer>, usize), u64) -> Request,
    done: Vec<terrace_far_memory::Completion>,
}

impl Load for Far<'_> {
    fn begin(&mut self, operations: &[(u64, usize)]) -> Result<()> {
        let requests = operations
            .iter()
            .map(|&(page, slot)| (self.request)(page, (self.buffer.clone(), slot), slot as u64));
        self.client.submit(requests).map_err(|(_, error)| error)?;
        Ok(())
    }

    fn poll(&mut self, ended: &mut Vec<usize>) -> Result<()> {
        self.client.poll(&mut self.done);
        for completion in self.done.drain(..) {
            completion.result?;
            ended.push(completion.tag as usize);
        }
        Ok(())
    }
}

struct OneSided<'a> {
    client: &'a terrace_node::Client,
    region: terrace_node::Region<'a>,
    buffer: Buffer,
    writes: bool,
    done: Vec<terrace_node::Completion>,
}

impl Load for OneSided<'_> {
    fn begin(&mut self, operations: &[(u64, usize)]) -> Result<()> {
        for &(page, slot) in operations {
            let (offset, at) = (page * PAGE_BYTES as u64, slot * PAGE_BYTES);
            match self.writes {
                true => self.region.write(offset, &self.buffer, at, PAGE_BYTES as u32, slot as u64)?,
                false => self.region.read(offset, &self.buffer, at, PAGE_BYTES as u32, slot as u64)?,
            }
        }
        Ok(())
    }

    fn poll(&mut self, ended: &mut Vec<usize>) -> Result<()> {
        self.client.poll(&mut self.done)?;
        for completion in self.done.drain(..) {
            if completion.status != WcStatus::Success {
                return Err(format!("{:?}", completion.status).into());
            }
            ended.push(completion.tag as usize);
        }
        Ok(())
    }
}

/// Keeps `depth` operations in flight on different pages, and returns their number and latencies in microseconds.
fn run(load: &mut dyn Load, depth: usize, count_max: u64) -> Result<(u64, f64, Vec<f64>)> {
    let (started, mut latencies, mut ended) = (Instant::now(), Vec::new(), Vec::new());
    let mut next = Vec::new();
    let mut since = vec![started; depth];
    let (mut begun, mut finished) = (0, 0);
    let mut free: Vec<usize> = (0..depth).collect();
    loop {
        let is_over = started.elapsed() > DURATION || begun == count_max;
        if is_over && finished == begun {
            return Ok((finished, started.elapsed().as_secs_f64(), latencies));
        }
        while !is_over
            && begun < count_max
            && let Some(slot) = free.pop()
        {
            since[slot] = Instant::now();
            next.push((begun.wrapping_mul(4099) % PAGES, slot));
            begun += 1;
        }
        load.begin(&next)?;
        next.clear();
        load.poll(&mut ended)?;
        for slot in ended.drain(..) {
            latencies.push(since[slot].elapsed().as_secs_f64() * 1e6);
            free.push(slot);
            finished += 1;
        }
    }
}

/// Measures at depth 1 and at depth, and prints a line.
fn row(name: &str, load: &mut dyn Load, node: &Child, depths: &[usize], count_max: u64) -> Result<()> {
    for depth in depths {
        let before = thread_times(node)?;
        let (count, seconds, mut latencies) = run(load, *depth, count_max)?;
        let after = thread_times(node)?;
        latencies.sort_by(f64::total_cmp);
        let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize];
        print!(
            "{name:<16} depth {depth:>2}: {:>8.0}/s  p50 {:>7.1} us  p99 {:>7.1} us ",
            count as f64 / seconds,
            at(0.5),
            at(0.99)
        );
        for (thread, time) in &after {
            let used = time - before.get(thread).unwrap_or(&0.0);
            if used > 0.0 || thread == "memory-node" {
                print!(" {thread} {used:.2} s ({:.2} us/op)", used * 1e6 / count as f64);
            }
        }
        println!();
    }
    Ok(())
}

fn measure(path: PathChoice, scheme: Scheme) -> Result<()> {
    let mut process = Command::new(std::env::current_exe()?)
        .args(["node", scheme.name()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(process.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    let (address, instance) = line.trim().split_once(' ').ok_or("no address")?;
    let config = ClientConfig::new(vec![address.parse()?], PAGES);
    let port = PortConfig { path, ..config.port.clone() };
    let client = Client::connect(&ClientConfig { port: port.clone(), ..config })?;
    let plain = terrace_node::ClientConfig::new(LOOPBACK);
    let plain = terrace_node::Client::connect(&terrace_node::ClientConfig {
        instance: instance.parse()?,
        port,
        ..plain
    })?;
    let one_sided = |writes| -> Result<OneSided<'_>> {
        let (region, buffer) = (plain.open("pages")?, plain.buffer(DEPTH * PAGE_BYTES)?);
        Ok(OneSided { client: &plain, region, buffer, writes, done: Vec::new() })
    };
    let far = |request| -> Result<Far<'_>> {
        Ok(Far { client: &client, buffer: client.buffer(DEPTH)?, request, done: Vec::new() })
    };
    let store = |page, from, tag| Request::Store { page, from, tag };
    // All pages once: the first stores are unmapped ones.
    row("unmapped store", &mut far(store)?, &process, &[DEPTH], PAGES)?;
    for _ in 0..2 {
        row("READ", &mut one_sided(false)?, &process, &[1, DEPTH], u64::MAX)?;
        row(
            "load",
            &mut far(|page, into, tag| Request::Load { page, into, tag })?,
            &process,
            &[1, DEPTH],
            u64::MAX,
        )?;
        row("WRITE", &mut one_sided(true)?, &process, &[1, DEPTH], u64::MAX)?;
        row("mapped store", &mut far(store)?, &process, &[1, DEPTH], u64::MAX)?;
    }
    row(
        "invalidation",
        &mut far(|page, _, tag| Request::Invalidate { page, tag })?,
        &process,
        &[DEPTH],
        PAGES,
    )?;
    drop((client, plain, process.stdin.take()));
    process.wait()?;
    Ok(())
}
