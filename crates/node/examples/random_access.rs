//! Reads and writes random pages of a region, several at a time, and prints the rate.
//!
//! ```sh
//! terrace serve --listen 127.0.0.1 --region table=/tmp/table.bin:1G --dram 256M &
//! cargo run --release -p terrace-node --example random_access -- 127.0.0.1 table 5
//! ```

use std::time::{Duration, Instant};

use terrace_node::{Client, ClientConfig, Span};

const PAGE: u32 = 4096;
const DEPTH: usize = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let server = args.next().ok_or("usage: random_access ADDRESS REGION SECONDS")?.parse()?;
    let name = args.next().unwrap_or("table".into());
    let seconds = args.next().map_or(Ok(5), |text| text.parse())?;

    let client = Client::connect(&ClientConfig::new(server))?;
    let region = client.open(&name)?;
    let pages = region.len() / u64::from(PAGE);
    let buffer = client.buffer(DEPTH * PAGE as usize)?;
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next_page = || {
        // Xorshift.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % pages
    };
    let mut span = |slot: usize| Span {
        offset: next_page() * u64::from(PAGE),
        at: slot * PAGE as usize,
        len: PAGE,
        tag: slot as u64,
    };
    let first: Vec<Span> = (0..DEPTH).map(&mut span).collect();
    region.read_many(&buffer, &first)?;
    let (started, mut count, mut done) = (Instant::now(), 0_u64, Vec::new());
    while started.elapsed() < Duration::from_secs(seconds) {
        client.poll(&mut done)?;
        let next: Vec<Span> = done.drain(..).map(|completion| span(completion.tag as usize)).collect();
        count += next.len() as u64;
        region.read_many(&buffer, &next)?;
    }
    println!("{:.0} reads of {PAGE} bytes per second", count as f64 / started.elapsed().as_secs_f64());
    Ok(())
}
