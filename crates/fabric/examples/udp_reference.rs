//! The cost of plain UDP on this machine: the reference for the benchmarks' numbers.
//!
//! `rtt`: the round trip of a datagram between two polling processes over the loopback interface. `stream`: one-way
//! bytes per second with GSO on one side and GRO on the other.

use std::hint::black_box;
use std::io::{self, BufRead, BufReader, IoSlice, IoSliceMut, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrIn, recvmsg, sendmsg, setsockopt, sockopt};

const USAGE: &str = "\
Measures bare UDP over the loopback, as a reference for the benchmarks.

usage: udp_reference [rtt] [--request BYTES] [--reply BYTES] [--seconds S] [--json]
       udp_reference stream [--segment BYTES] [--total BYTES_PER_SEND] [--seconds S] [--json]

rtt     round trip of a request (default 64) and a reply (default 4096); both processes poll
stream  one way, GSO sends of at most 65507 bytes (default 15 segments) in segments (default 4112), GRO receives";

struct Options {
    mode: String,
    request: usize,
    reply: usize,
    segment: usize,
    total: usize,
    seconds: f64,
    json: bool,
    peer: Option<SocketAddr>,
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(message) => {
            eprintln!("{message}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let result = match options.mode.as_str() {
        "rtt" => round_trip(&options),
        "stream" => stream(&options),
        "rtt-peer" => echo(&options),
        _ => flood(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("udp_reference: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        mode: "rtt".into(),
        request: 64,
        reply: 4096,
        segment: 4112,
        total: 0,
        seconds: 1.0,
        json: false,
        peer: None,
    };
    while let Some(arg) = args.next() {
        let mut number = |what: &mut usize| -> Result<(), String> {
            let text = args.next().ok_or(format!("{arg} needs a value"))?;
            *what = text.parse().map_err(|_| format!("{arg}: {text} is not a number"))?;
            Ok(())
        };
        match arg.as_str() {
            "--request" => number(&mut options.request)?,
            "--reply" => number(&mut options.reply)?,
            "--segment" => number(&mut options.segment)?,
            "--total" => number(&mut options.total)?,
            "--seconds" => {
                let text = args.next().unwrap_or_default();
                options.seconds = text.parse().map_err(|_| format!("--seconds: {text} is not a number"))?;
            }
            "--json" => options.json = true,
            "--peer" => options.peer = args.next().and_then(|text| text.parse().ok()),
            "rtt" | "stream" | "rtt-peer" | "stream-peer" => options.mode = arg,
            _ => return Err(format!("unknown argument {arg}")),
        }
    }
    if options.total == 0 {
        options.total = (65_507 / options.segment.max(1)).min(64) * options.segment;
    }
    let sizes = [options.request, options.reply, options.segment, options.total];
    if sizes.iter().any(|size| !(1..=65_507).contains(size)) {
        return Err("sizes lie between 1 and 65507 bytes".into());
    }
    Ok(options)
}

/// A non-blocking socket with large buffers, on a port that the kernel chooses.
fn polled_socket() -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.set_nonblocking(true)?;
    if setsockopt(&socket, sockopt::RcvBufForce, &(16 << 20)).is_err() {
        let _ = setsockopt(&socket, sockopt::RcvBuf, &(16 << 20));
    }
    Ok(socket)
}

/// Starts another process of this program as the other end.
fn spawn_peer(mode: &str, options: &Options, local: SocketAddr) -> io::Result<(Child, SocketAddr)> {
    let mut child = Command::new(std::env::current_exe()?)
        .args([mode, "--peer", &local.to_string()])
        .args(["--reply", &options.reply.to_string()])
        .args(["--segment", &options.segment.to_string(), "--total", &options.total.to_string()])
        .args(["--seconds", &(options.seconds * 1.5 + 1.0).to_string()])
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    let address = line.trim().parse().map_err(|_| io::Error::other("the other end did not start"))?;
    Ok((child, address))
}

fn announce(socket: &UdpSocket) -> io::Result<()> {
    println!("{}", socket.local_addr()?);
    io::stdout().flush()
}

/// Polls until a datagram arrives; `None` at `until`.
fn poll(socket: &UdpSocket, buffer: &mut [u8], until: Instant) -> io::Result<Option<SocketAddr>> {
    let mut polls = 0u32;
    loop {
        match socket.recv_from(buffer) {
            Ok((_, from)) => return Ok(Some(from)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        polls = polls.wrapping_add(1);
        if polls.is_multiple_of(1024) && Instant::now() > until {
            return Ok(None);
        }
    }
}

fn echo(options: &Options) -> io::Result<()> {
    let socket = polled_socket()?;
    announce(&socket)?;
    let until = Instant::now() + Duration::from_secs_f64(options.seconds);
    let (mut buffer, reply) = (vec![0; 65_536], vec![7; options.reply]);
    while let Some(from) = poll(&socket, &mut buffer, until)? {
        socket.send_to(&reply, from)?;
    }
    Ok(())
}

fn round_trip(options: &Options) -> io::Result<()> {
    let socket = polled_socket()?;
    let (mut child, peer) = spawn_peer("rtt-peer", options, socket.local_addr()?)?;
    let (request, mut buffer) = (vec![5; options.request], vec![0; 65_536]);
    let start = Instant::now();
    let end = start + Duration::from_secs_f64(options.seconds);
    let warm = start + Duration::from_secs_f64(options.seconds * 0.2);
    let mut samples_ns = Vec::with_capacity(1 << 20);
    loop {
        let before = Instant::now();
        if before > end {
            break;
        }
        socket.send_to(&request, peer)?;
        let give_up = before + Duration::from_secs(1);
        if poll(&socket, &mut buffer, give_up)?.is_none() {
            return Err(io::Error::other("no reply within a second"));
        }
        if before > warm {
            samples_ns.push(before.elapsed().as_nanos() as u64);
        }
    }
    let _ = child.kill();
    let _ = child.wait();
    report_round_trip(options, samples_ns);
    Ok(())
}

fn report_round_trip(options: &Options, mut samples_ns: Vec<u64>) {
    samples_ns.sort_unstable();
    let rounds = samples_ns.len();
    let at_us =
        |part: f64| samples_ns.get((rounds as f64 * part) as usize).map_or(0.0, |ns| *ns as f64 / 1e3);
    let (request, reply, p50, p99) = (options.request, options.reply, at_us(0.5), at_us(0.99));
    if options.json {
        println!(
            "{{\"kind\":\"rtt\",\"request_bytes\":{request},\"reply_bytes\":{reply},\"rounds\":{rounds},\"rtt_us_p50\":{p50:.3},\"rtt_us_p99\":{p99:.3}}}"
        );
    } else {
        println!(
            "bare UDP round trip, {request} B there, {reply} B back: median {p50:.2} us, p99 {p99:.2} us ({rounds} rounds)"
        );
    }
}

fn flood(options: &Options) -> io::Result<()> {
    let socket = polled_socket()?;
    announce(&socket)?;
    let peer = match options.peer {
        Some(SocketAddr::V4(peer)) => SockaddrIn::from(peer),
        _ => return Err(io::Error::other("the other end needs --peer")),
    };
    let (data, segment) = (vec![3; options.total], options.segment as u16);
    let until = Instant::now() + Duration::from_secs_f64(options.seconds);
    // Credits keep the receiver's buffer from overflowing: it answers each 16 sends with one byte. Small sends get more
    // credits, so that two ends that share a processor do not spend their time on context switches.
    let mut credits = ((4 << 20) / options.total as i64).clamp(64, 1024);
    let mut byte = [0; 16];
    while Instant::now() < until {
        while socket.recv_from(&mut byte).is_ok() {
            credits += 16;
        }
        if credits <= 0 {
            continue;
        }
        let control = [ControlMessage::UdpGsoSegments(&segment)];
        sendmsg(socket.as_raw_fd(), &[IoSlice::new(&data)], &control, MsgFlags::empty(), Some(&peer))?;
        credits -= 1;
    }
    Ok(())
}

/// Counts bytes per window of 20 ms. The median window is reported, because a window in which another process used the
/// processor is not representative.
struct Windows {
    started: Instant,
    bytes: u64,
    rates: Vec<f64>,
}

impl Windows {
    fn add(&mut self, len: usize, now: Instant) {
        self.bytes += len as u64;
        let elapsed = now.duration_since(self.started);
        if elapsed >= Duration::from_millis(20) {
            self.rates.push(self.bytes as f64 / elapsed.as_secs_f64());
            self.bytes = 0;
            self.started = now;
        }
    }

    fn median(mut self) -> f64 {
        self.rates.sort_by(f64::total_cmp);
        self.rates.get(self.rates.len() / 2).copied().unwrap_or(0.0)
    }
}

fn stream(options: &Options) -> io::Result<()> {
    let socket = polled_socket()?;
    setsockopt(&socket, sockopt::UdpGroSegment, &true)?;
    let (mut child, peer) = spawn_peer("stream-peer", options, socket.local_addr()?)?;
    let mut buffer = vec![0; 65_536];
    let mut control = nix::cmsg_space!(i32);
    let start = Instant::now();
    let end = start + Duration::from_secs_f64(options.seconds);
    let mut windows = Windows { started: start, bytes: 0, rates: Vec::new() };
    let mut calls = 0u64;
    loop {
        let mut buffers = [IoSliceMut::new(&mut buffer)];
        let fd = socket.as_raw_fd();
        let received = recvmsg::<SockaddrIn>(fd, &mut buffers, Some(&mut control), MsgFlags::empty());
        let now = Instant::now();
        if now > end {
            break;
        }
        let Ok(message) = received else { continue };
        windows.add(black_box(message.bytes), now);
        calls += 1;
        if calls.is_multiple_of(16) {
            socket.send_to(&[1], peer)?;
        }
    }
    let _ = child.kill();
    let _ = child.wait();
    report_stream(options, windows.median());
    Ok(())
}

fn report_stream(options: &Options, rate: f64) {
    let (segment, total) = (options.segment, options.total);
    let packets = rate / segment as f64;
    if options.json {
        println!(
            "{{\"kind\":\"stream\",\"segment_bytes\":{segment},\"send_bytes\":{total},\"bytes_per_second\":{rate:.0},\"packets_per_second\":{packets:.0}}}"
        );
    } else {
        let gigabytes = rate / 1e9;
        println!(
            "bare UDP stream, GSO {total} B in segments of {segment} B: {gigabytes:.2} GB/s, {packets:.0} packets/s"
        );
    }
}
