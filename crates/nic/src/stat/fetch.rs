//! What `terrace stat` asks processes for.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use terrace_sync::{Mutex, without_signals};

use super::{DeviceSnapshot, SOCKETS_MAX, socket_name};

/// How long [`fetch`] waits for a process that does not answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest answer: any user can listen at such a name.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);
/// The most bytes of all answers that are being read, beyond which only short ones are. A device with 60,000 queue pairs has
/// 60 MiB.
const ANSWERS_BYTES_MAX: usize = 256 << 20;
const SHORT_BYTES_MAX: usize = ANSWERS_BYTES_MAX / THREADS_MAX;
/// Processes that are asked at a time.
const THREADS_MAX: usize = 64;

/// Tries with a device that accepts the connection and sends nothing.
const ASKED_MAX: u32 = 3;
/// Tries with a device that is gone, although the kernel's list has its socket. Where devices are opened and closed all
/// the time, successive devices may have the same number.
const LOOKED_FOR_MAX: u32 = 32;

/// Asks every device of a running process for its counters; a device that is closed meanwhile is skipped. An empty
/// answer means that the process has no device.
///
/// # Errors
/// When the process does not answer in time, or belongs to another user.
pub fn fetch(pid: u32) -> io::Result<Vec<DeviceSnapshot>> {
    fetch_with(pid, &AtomicUsize::new(0))
}

/// The same for several processes, in their order. Up to 64 of them that do not answer take the time of one.
pub fn fetch_all(pids: &[u32]) -> Vec<(u32, io::Result<Vec<DeviceSnapshot>>)> {
    let (next, bytes, answers) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::new(Vec::new()));
    let ask = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(&pid) = pids.get(index) else { return };
            let answer = fetch_with(pid, &bytes);
            answers.lock().push((index, (pid, answer)));
        }
    };
    std::thread::scope(|scope| {
        let spawn = || std::thread::Builder::new().name("terrace-ask".into()).spawn_scoped(scope, ask);
        // Without more threads, these ask one process after another.
        let _ = without_signals(|| (1..pids.len().min(THREADS_MAX)).try_for_each(|_| spawn().map(drop)));
        ask();
    });
    let mut answers = std::mem::take(&mut *answers.lock());
    answers.sort_by_key(|(index, _)| *index);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

fn fetch_with(pid: u32, bytes: &AtomicUsize) -> io::Result<Vec<DeviceSnapshot>> {
    let mut snapshots = Vec::new();
    for number in open_sockets(pid)? {
        snapshots.extend(fetch_one(pid, number, bytes)?);
    }
    Ok(snapshots)
}

/// `None` if the device is closed meanwhile. `bytes` are those of answers that other threads are reading, too.
fn fetch_one(pid: u32, number: u32, bytes: &AtomicUsize) -> io::Result<Option<DeviceSnapshot>> {
    let (mut silent, mut missing) = (0, 0);
    while silent < ASKED_MAX {
        let answer = ask(pid, number, bytes);
        match &answer {
            Ok(text) if !text.is_empty() => return Ok(Some(serde_json::from_slice(text)?)),
            // The device is there, and takes too long.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let why = format!("no answer within {} s: it may be stopped", ANSWER_TIMEOUT.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return answer.map(|_| None),
            // A device that did not answer may have been closed, and another may have its number by now.
            _ if !open_sockets(pid)?.contains(&number) => return Ok(None),
            Ok(_) => silent += 1,
            Err(_) if missing == LOOKED_FOR_MAX => return answer.map(|_| None),
            Err(_) => missing += 1,
        }
    }
    let why = "the process answers only its own user and root";
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// A device's answer, empty if it sends none.
fn ask(pid: u32, number: u32, bytes: &AtomicUsize) -> io::Result<Vec<u8>> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The timeout covers a process that accepts no connections, too: once its backlog is full, `connect` blocks.
    set_socket_timeout(&socket, Timeout::Send, Some(ANSWER_TIMEOUT))?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(socket_name(pid, number).as_bytes())?)?;
    let stream = UnixStream::from(socket);
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let mut text = Vec::new();
    let result = read_answer(stream, &mut text, bytes);
    bytes.fetch_sub(text.len(), Ordering::Relaxed);
    result.map(|()| text)
}

/// Reads an answer, and counts its bytes.
fn read_answer(mut stream: UnixStream, text: &mut Vec<u8>, bytes: &AtomicUsize) -> io::Result<()> {
    let mut chunk = vec![0; 64 << 10];
    let deadline = Instant::now() + ANSWER_TIME_MAX;
    while Instant::now() < deadline
        && (text.len() <= SHORT_BYTES_MAX || bytes.load(Ordering::Relaxed) <= ANSWERS_BYTES_MAX)
    {
        match stream.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                text.extend_from_slice(&chunk[..count]);
                bytes.fetch_add(count, Ordering::Relaxed);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "its answer does not end"))
}

/// Processes that have a device, in the order of their numbers.
///
/// # Errors
/// When the kernel's list of sockets cannot be read.
pub fn processes() -> io::Result<Vec<u32>> {
    let mut pids: Vec<u32> = socket_suffixes("terrace/")?
        .iter()
        .filter_map(|suffix| suffix.split('/').next()?.parse().ok())
        .collect();
    pids.sort_unstable();
    pids.dedup();
    Ok(pids)
}

/// Numbers of the sockets that exist for a process.
fn open_sockets(pid: u32) -> io::Result<Vec<u32>> {
    let mut numbers: Vec<u32> = socket_suffixes(&socket_name(pid, 0))?
        .iter()
        .filter_map(|suffix| match suffix.strip_prefix('/') {
            Some(number) => number.parse().ok(),
            None => suffix.is_empty().then_some(0),
        })
        .collect();
    numbers.retain(|number| *number < SOCKETS_MAX);
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers)
}

/// What follows `prefix` in the names of the abstract sockets that have it, from the kernel's list.
fn socket_suffixes(prefix: &str) -> io::Result<Vec<String>> {
    // Names of other programs are any bytes.
    let list = String::from_utf8_lossy(&std::fs::read("/proc/net/unix")?).into_owned();
    let prefix = format!("@{prefix}");
    let names = list.lines().filter_map(|line| line.split_whitespace().last());
    Ok(names.filter_map(|name| name.strip_prefix(&prefix)).map(str::to_owned).collect())
}
