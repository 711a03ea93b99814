//! The copies and atomics of every implementation that this machine can run, over all small sizes and alignments.

use proptest::prelude::*;

use super::{Fault, install, portable};

/// A copy routine: to, from, length, and which of the two addresses is the program's.
type Copy = unsafe fn(u64, u64, usize, u64) -> Result<(), Fault>;

fn copies() -> Vec<(&'static str, Copy)> {
    install().unwrap();
    #[allow(unused_mut, reason = "elsewhere the portable one is all there is")]
    let mut all: Vec<(&str, Copy)> = vec![("portable", portable::copy)];
    #[cfg(target_arch = "x86_64")]
    {
        all.push(("sse", super::x86_64::copy_sse));
        if std::arch::is_x86_feature_detected!("avx") {
            all.push(("avx", super::x86_64::copy_avx));
        }
        if std::arch::is_x86_feature_detected!("avx512f") {
            all.push(("avx512", super::x86_64::copy_avx512));
        }
    }
    all
}

/// Which side is the program's.
#[derive(Clone, Copy, Debug)]
enum Anchor {
    To,
    From,
}

/// Copies between two buffers at given distances from a page boundary, and checks every byte around as well.
fn check(copy: Copy, to_offset: usize, from_offset: usize, len: usize, anchor: Anchor) {
    const ROOM: usize = 192;
    let from: Vec<u8> = (0..from_offset + len + ROOM).map(|n| (n * 7 + n / 251) as u8 | 1).collect();
    let mut to = vec![0u8; to_offset + len + ROOM];
    let align = |buffer: &[u8]| buffer.as_ptr().align_offset(64);
    let (to_start, from_start) = (align(&to) + to_offset, align(&from) + from_offset);
    let (to_addr, from_addr) = (to[to_start..].as_mut_ptr() as u64, from[from_start..].as_ptr() as u64);
    let anchor = match anchor {
        Anchor::To => to_addr,
        Anchor::From => from_addr,
    };
    // SAFETY: both ranges lie within the vectors.
    unsafe { copy(to_addr, from_addr, len, anchor) }.unwrap();
    assert!(
        to[..to_start].iter().chain(&to[to_start + len..]).all(|&byte| byte == 0),
        "wrote beside the target"
    );
    assert_eq!(to[to_start..to_start + len], from[from_start..from_start + len]);
}

#[test]
fn every_small_size_at_every_alignment() {
    for (name, copy) in copies() {
        // One system call per copy makes the portable one slow, and alignment means nothing to it.
        let (sizes, step) = if name == "portable" { (0..40, 7) } else { (0..300, 1) };
        for len in sizes {
            for to_offset in (0..16).step_by(step) {
                for from_offset in (0..16).step_by(step) {
                    for anchor in [Anchor::To, Anchor::From] {
                        check(copy, to_offset, from_offset, len, anchor);
                    }
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn larger_sizes_at_any_alignment(
        to_offset in 0usize..64,
        from_offset in 0usize..64,
        len in 0usize..20_000,
        to_is_anchor: bool,
    ) {
        for (_, copy) in copies() {
            check(copy, to_offset, from_offset, len, if to_is_anchor { Anchor::To } else { Anchor::From });
        }
    }
}

/// Two pages of which the second is not accessible.
struct Edge(u64);

impl Edge {
    fn new() -> Edge {
        // SAFETY: a new mapping, of which the second page loses its permissions.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let addr =
                libc::mmap(std::ptr::null_mut(), 8192, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(addr, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(addr.byte_add(4096), 4096, libc::PROT_NONE), 0);
            Edge(addr as u64)
        }
    }

    fn page(&mut self) -> &mut [u8] {
        // SAFETY: the first page is accessible and ours.
        unsafe { std::slice::from_raw_parts_mut(self.0 as *mut u8, 4096) }
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        // SAFETY: unmaps what `new` mapped.
        unsafe { libc::munmap(self.0 as *mut _, 8192) };
    }
}

#[test]
fn a_fault_at_any_place_is_reported_and_nothing_beyond_the_place_of_the_fault_is_written() {
    let mut edge = Edge::new();
    for (name, copy) in copies() {
        for len in (1..400).step_by(if name == "portable" { 37 } else { 1 }) {
            // How many bytes lie before the edge.
            for before in
                [0, 1, 2, 7, 8, 31, 64, 127, 128, 200, 399].into_iter().filter(|&before| before < len)
            {
                let addr = edge.0 + 4096 - before as u64;
                edge.page().fill(0);
                let data = vec![0xccu8; len];
                // SAFETY: the target is the edge's pages, accessible or not.
                let written = unsafe { copy(addr, data.as_ptr() as u64, len, addr) };
                assert_eq!(written, Err(Fault), "{name} {len} {before}");
                let page = edge.page();
                assert!(page[..4096 - before].iter().all(|&byte| byte == 0));
                // Ascending: what was written is a prefix.
                let prefix = page[4096 - before..].iter().take_while(|&&byte| byte == 0xcc).count();
                assert!(
                    page[4096 - before + prefix..].iter().all(|&byte| byte == 0),
                    "{name} {len} {before}"
                );

                let mut out = vec![0u8; len];
                // SAFETY: the source is the edge's pages, accessible or not; the target is a vector.
                let read = unsafe { copy(out.as_mut_ptr() as u64, addr, len, addr) };
                assert_eq!(read, Err(Fault), "{name} {len} {before}");
            }
        }
    }
}

#[test]
fn the_portable_atomics_agree_with_the_others() {
    install().unwrap();
    let mut edge = Edge::new();
    let addr = edge.0 + 4088;
    // SAFETY: the address is aligned, on an accessible page of our own.
    unsafe {
        assert_eq!(portable::swap(addr, 7), Ok(0));
        assert_eq!(super::fetch_add(addr, 5), Ok(7));
        assert_eq!(portable::fetch_add(addr, u64::MAX), Ok(12));
        assert_eq!(portable::compare_swap(addr, 1, 2), Ok(11));
        assert_eq!(super::compare_swap(addr, 11, 3), Ok(11));
        assert_eq!(portable::compare_swap(addr, 3, 4), Ok(3));
        assert_eq!(super::swap(addr, 9), Ok(4));
    }
    assert_eq!(edge.page()[4088..], 9u64.to_ne_bytes());
    let beyond = edge.0 + 4096;
    // SAFETY: aligned, and on a page that is not accessible.
    unsafe {
        assert_eq!(portable::swap(beyond, 7), Err(Fault));
        assert_eq!(portable::fetch_add(beyond, 7), Err(Fault));
        assert_eq!(portable::compare_swap(beyond, 7, 8), Err(Fault));
        assert_eq!(super::swap(beyond, 7), Err(Fault));
        assert_eq!(super::fetch_add(beyond, 7), Err(Fault));
        assert_eq!(super::compare_swap(beyond, 7, 8), Err(Fault));
    }
}
