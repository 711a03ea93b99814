//! Checks that memory is left for the allocations of a verb.
//!
//! Rust's collections abort the process without memory, and so does the C library in some cases, but a verb has to
//! return ENOMEM. So if the process has a limit (`ulimit -v` or `-d`), the verbs that create objects first check that
//! enough memory is left. They compute the available memory instead of trying an allocation, which could make another
//! thread's allocation fail.

use std::fs::File;
use std::io::Read;

use terrace_sync::write_line_now;

use crate::errno::{ENOMEM, Result};

/// Upper bound of an open device's memory: buffers, and the engine's thread with its stack.
const DEVICE_BYTES: u64 = 8 << 20;
/// Upper bound of any other object's memory, with a reserve for its later allocations.
const OBJECT_BYTES: u64 = 2 << 20;

/// The process's sizes in pages; see proc(5).
const SIZES: &str = "/proc/self/statm";
/// Fields of `SIZES`, and their limits.
const COUNTED: [(usize, libc::__rlimit_resource_t); 2] = [(0, libc::RLIMIT_AS), (5, libc::RLIMIT_DATA)];

/// Checks that memory is left for a device.
///
/// # Errors
/// ENOMEM, and a line on standard error.
pub fn for_device() -> Result<()> {
    check_available(DEVICE_BYTES).inspect_err(|_| {
        let line = "terrace: not enough memory to open the device; raise the limit with `ulimit -v`\n";
        // The line is short, and needs no memory.
        write_line_now(line.as_bytes());
    })
}

/// Checks that memory is left for an object of a device.
///
/// # Errors
/// ENOMEM.
pub fn for_object() -> Result<()> {
    check_available(OBJECT_BYTES)
}

fn check_available(bytes: u64) -> Result<()> {
    let limits = COUNTED.map(|(_, resource)| limit(resource));
    if limits.iter().all(|&limit| limit == libc::RLIM_INFINITY) {
        return Ok(());
    }
    let mut text = [0; 128];
    // If the file cannot be read, for example without a free descriptor, the verb proceeds.
    let Ok(length) = File::open(SIZES).and_then(|mut file| file.read(&mut text)) else { return Ok(()) };
    let left = std::iter::zip(COUNTED, limits)
        .filter_map(|((field, _), limit)| Some(limit.saturating_sub(used(&text[..length], field)?)));
    let left = left.min().unwrap_or(u64::MAX);
    if left >= bytes || left + free_in_the_heap() >= bytes { Ok(()) } else { Err(ENOMEM) }
}

fn limit(resource: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a structure to be written to.
    unsafe { libc::getrlimit(resource, &raw mut limit) };
    limit.rlim_cur
}

/// One of the sizes, in bytes.
fn used(sizes: &[u8], field: usize) -> Option<u64> {
    let text = sizes.split(|&byte| byte == b' ').nth(field)?;
    let pages = text.iter().try_fold(0_u64, |sum, &digit| match digit {
        b'0'..=b'9' => sum.checked_mul(10)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })?;
    // SAFETY: no preconditions.
    pages.checked_mul(unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64)
}

/// Freed bytes that the allocator has not returned to the kernel. Slow to count.
#[cold]
fn free_in_the_heap() -> u64 {
    // SAFETY: no preconditions.
    unsafe { libc::mallinfo2() }.fordblks as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_counted_in_pages() {
        // SAFETY: no preconditions.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
        assert_eq!(used(b"12 3 4 5 0 7 0\n", 0), Some(12 * page));
        assert_eq!(used(b"12 3 4 5 0 7 0\n", 5), Some(7 * page));
        assert_eq!(used(b"12 3\n", 5), None);
        assert_eq!(used(b"x 3", 0), None);
    }
}
