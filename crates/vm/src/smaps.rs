//! The private memory of another process, from `/proc/PID/smaps` (see proc_pid_smaps(5)).

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use terrace_hostmem::HostRange;

use crate::maps::{self, Mapping};

/// Kernels without it do not say what a stack is.
const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage";

/// A mapping of private memory without a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrivateMapping {
    /// The addresses.
    pub range: HostRange,
    /// Whether a descriptor of `userfaultfd(2)` handles its faults.
    pub is_registered: bool,
    /// Whether it has no huge pages: Linux 6.7 and later give none to mappings with `MAP_STACK`, such as the stacks of threads,
    /// those that the C library keeps for other threads among them. The program may have asked for that by `MADV_NOHUGEPAGE`, too.
    pub may_be_stack: bool,
}

/// The mappings that have at least this length in bytes, without the main thread's stack. Memory that the process has reserved,
/// and cannot access yet, is among them: allocators make it accessible part by part.
///
/// # Errors
/// `Unsupported` if the kernel does not say what a stack is; the system's.
pub fn private_memory_of(pid: u32, len_min: u64) -> io::Result<Vec<PrivateMapping>> {
    if !Path::new(HUGE_PAGES).exists() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let list = File::open(format!("/proc/{pid}/smaps"))?;
    list_in(BufReader::with_capacity(1 << 16, list), len_min)
}

/// The registered mappings of a child that have the bytes of its parent's, in the order of addresses: all but those with
/// `MADV_WIPEONFORK`. The parent's mappings with `MADV_DONTFORK` are none of the child's.
///
/// # Errors
/// `Unsupported` if there are none: the kernel does not say which ones are registered. The system's.
pub fn inherited_by(pid: u32) -> io::Result<Vec<HostRange>> {
    let list = File::open(format!("/proc/{pid}/smaps"))?;
    let found = inherited_in(BufReader::with_capacity(1 << 16, list))?;
    if found.is_empty() { Err(io::ErrorKind::Unsupported.into()) } else { Ok(found) }
}

fn inherited_in(mut list: impl BufRead) -> io::Result<Vec<HostRange>> {
    let (mut found, mut line, mut current) = (Vec::new(), Vec::new(), None);
    while maps::next_line(&mut list, &mut line)? {
        if let Some(mapping) = Mapping::parse(&line) {
            current = Some(mapping.range());
        } else if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            found.extend(current.filter(|_| has_flag(flags, b"um") && !has_flag(flags, b"wf")));
        }
    }
    Ok(found)
}

fn has_flag(flags: &[u8], flag: &[u8]) -> bool {
    flags.split(|&byte| byte == b' ').any(|word| word == flag)
}

/// A mapping has a line as in `maps`, then lines with names and numbers, and a line with flags at the end.
fn list_in(mut list: impl BufRead, len_min: u64) -> io::Result<Vec<PrivateMapping>> {
    let (mut found, mut line, mut current) = (Vec::new(), Vec::new(), None);
    while maps::next_line(&mut list, &mut line)? {
        if let Some(mapping) = Mapping::parse(&line) {
            let is_private = mapping.is_private_memory() || mapping.is_reserved();
            current = Some(mapping.range()).filter(|range| is_private && range.len >= len_min);
        } else if let (Some(flags), Some(range)) = (line.strip_prefix(b"VmFlags:"), current) {
            let (is_registered, may_be_stack) = (has_flag(flags, b"um"), has_flag(flags, b"nh"));
            found.push(PrivateMapping { range, is_registered, may_be_stack });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "\
10000-11000 ---p 00000000 00:00 0
Size:                  4 kB
VmFlags: mr mw me nh
11000-91000 rw-p 00000000 00:00 0
Size:                512 kB
VmFlags: rd wr mr mw me ac nh
a0000-e0000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me ac um uw
f0000-f1000 rw-p 00000000 fe:00 7                          /lib/x.so
VmFlags: rd wr mr mw me ac nh
";

    #[test]
    fn stacks_and_registered_memory_are_known_by_their_flags() {
        let found = list_in(LIST.as_bytes(), 0x2000).unwrap();
        let stack = HostRange { addr: 0x11000, len: 0x80000 };
        let heap = HostRange { addr: 0xa0000, len: 0x40000 };
        assert_eq!(
            found,
            [
                PrivateMapping { range: stack, is_registered: false, may_be_stack: true },
                PrivateMapping { range: heap, is_registered: true, may_be_stack: false },
            ]
        );
    }

    #[test]
    fn memory_that_a_fork_wipes_is_not_inherited() {
        let heap = HostRange { addr: 0xa0000, len: 0x40000 };
        assert_eq!(inherited_in(LIST.as_bytes()).unwrap(), [heap]);
        let wiped = LIST.replace("ac um uw", "wf ac um uw");
        assert_eq!(inherited_in(wiped.as_bytes()).unwrap(), []);
    }

    #[test]
    fn the_stack_of_a_thread_is_known() {
        let (begin, end) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let local = 0u8;
                let addr = (&raw const local).addr() as u64;
                begin.wait();
                end.wait();
                addr
            });
            begin.wait();
            let found = private_memory_of(std::process::id(), 64 << 10).unwrap();
            end.wait();
            let addr = thread.join().unwrap();
            let one = HostRange { addr, len: 1 };
            let stack = found.iter().find(|mapping| mapping.range.overlaps(one)).unwrap();
            assert!(stack.may_be_stack && !stack.is_registered, "{stack:?}");
        });
    }
}
