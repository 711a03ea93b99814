//! A region whose pages are in frames of a pool, as a same-host peer accesses it: by the owner's page table, without
//! the owner's help.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use terrace_hostmem::{HostRange, PAGE_BYTES, fault, prefetch};

use crate::page_entry::PageEntry;
use crate::page_table::{AccessCounters, PageEntries};
use crate::peer_hits::PeerHits;
use crate::source::{BackedBy, Direction, Mapped, Missing};

/// The frames of another process's pool.
#[derive(Debug)]
pub struct Frames {
    /// The pool's file; open for writing if the other process may write there.
    pub file: OwnedFd,
    /// Where in the file the first frame is.
    pub offset: u64,
    /// The number of frames.
    pub count: u32,
}

/// The descriptors of what the other process keeps about a region in frames.
#[derive(Debug)]
pub struct FrameTables {
    /// The page table ([`PageEntries::file`]).
    pub entries: OwnedFd,
    /// The counters of accesses of the pool's frames ([`AccessCounters::file`]).
    pub counters: OwnedFd,
    /// The counters of the region's hits ([`PeerHits::file`]).
    pub hits: OwnedFd,
}

/// A region of another process whose pages are in frames.
///
/// The caller's reader epoch is odd, and its hazard pointer names the pages: a page that the table shows mapped keeps
/// its frame meanwhile.
#[derive(Debug)]
pub struct Framed {
    range: HostRange,
    /// The frames, as if the first one were at address 0.
    frames: Mapped,
    frame_count: u32,
    entries: PageEntries,
    counters: AccessCounters,
    hits: PeerHits,
}

impl Framed {
    /// Maps the frames and the tables. `range` has the owner's addresses of the region.
    ///
    /// # Errors
    /// `InvalidData` when the tables do not fit; the system's.
    pub fn new(range: HostRange, frames: Frames, tables: FrameTables) -> io::Result<Framed> {
        let Frames { file, offset, count } = frames;
        let page_count =
            usize::try_from(range.len.div_ceil(PAGE_BYTES)).map_err(|_| io::ErrorKind::InvalidData)?;
        let all = HostRange { addr: 0, len: u64::from(count) * PAGE_BYTES };
        Ok(Framed {
            range,
            frames: Mapped::new(&BackedBy { file, offset, range: all })?,
            frame_count: count,
            entries: PageEntries::open(tables.entries, page_count)?,
            counters: AccessCounters::open(tables.counters, count as usize)?,
            hits: PeerHits::open(tables.hits)?,
        })
    }

    /// Drops the mapping of the frames. Later accesses find that the memory is not there.
    pub(crate) fn give_up(&self) {
        self.frames.give_up();
    }

    fn entry(&self, page: u64) -> PageEntry {
        self.entries.get(page as usize).map_or(PageEntry::default(), |word| {
            // Acquire: what was stored to the frame before it was mapped is seen.
            PageEntry::from_word(word.load(Ordering::Acquire))
        })
    }

    /// Where this process has a part of a page that the caller has found mapped in this epoch. Counts the access.
    fn place(&self, page: u64, offset: u64, len: u64) -> Result<u64, Missing> {
        let frame = self.entry(page).frame();
        // The other process may have written any number there.
        if frame >= self.frame_count {
            return Err(Missing);
        }
        self.counters.count(frame as usize);
        self.frames.place(u64::from(frame) * PAGE_BYTES + offset, len)
    }

    fn page_of(&self, host: u64) -> u64 {
        host.wrapping_sub(self.range.addr) / PAGE_BYTES
    }

    /// Where the entry of the page is that an address lies in.
    pub(crate) fn place_of_entry(&self, host: u64) -> Option<u64> {
        self.entries.get(self.page_of(host) as usize).map(|word| word.as_ptr() as u64)
    }

    /// Has the processor load the first line of the memory at an address, where the page's entry says it is.
    pub(crate) fn prefetch(&self, host: u64) {
        let frame = self.entry(self.page_of(host)).frame();
        if let Ok(place) = self
            .frames
            .place(u64::from(frame) * PAGE_BYTES + host.wrapping_sub(self.range.addr) % PAGE_BYTES, 0)
        {
            prefetch(place);
        }
    }

    fn permits(&self, direction: Direction, page: u64) -> bool {
        let entry = self.entry(page);
        match direction {
            Direction::Read => entry.is_readable(),
            Direction::Write => entry.is_writable(),
        }
    }

    /// Splits a range of the owner's addresses at page borders: page, offset in it, length.
    fn pieces(&self, host: u64, len: u64) -> Result<impl Iterator<Item = (u64, u64, u64)> + use<>, Missing> {
        let start = host.wrapping_sub(self.range.addr);
        if start > self.range.len || len > self.range.len - start || !self.entries.is_shared() {
            return Err(Missing);
        }
        let end = start + len;
        let pages = if len == 0 { 0..0 } else { start / PAGE_BYTES..end.div_ceil(PAGE_BYTES) };
        Ok(pages.map(move |page| {
            let (from, to) = ((page * PAGE_BYTES).max(start), ((page + 1) * PAGE_BYTES).min(end));
            (page, from % PAGE_BYTES, to - from)
        }))
    }

    /// Copies if all pages are mapped for that.
    pub(crate) fn copy(&self, direction: Direction, host: u64, local: HostRange) -> Result<(), Missing> {
        if !self.pieces(host, local.len)?.all(|(page, ..)| self.permits(direction, page)) {
            return Err(Missing);
        }
        let (mut here, mut page_count) = (local.addr, 0);
        for (page, offset, len) in self.pieces(host, local.len)? {
            let theirs = self.place(page, offset, len)?;
            let (to, from) = match direction {
                Direction::Read => (here, theirs),
                Direction::Write => (theirs, here),
            };
            // SAFETY: the program registered the local range, and has named it in a work request, or it is borrowed for
            // this call; the other side is our mapping.
            unsafe { fault::copy_across(to, from, len as usize, theirs) }.map_err(|fault::Fault| Missing)?;
            here += len;
            page_count += 1;
        }
        self.hits.add(page_count);
        Ok(())
    }

    /// Where this process has 8 aligned bytes whose page is mapped for writes.
    pub(crate) fn place_of_atomic(&self, host: u64) -> Result<u64, Missing> {
        let (page, offset, len) = self.pieces(host, 8)?.next().ok_or(Missing)?;
        if len < 8 || !self.permits(Direction::Write, page) {
            return Err(Missing);
        }
        let place = self.place(page, offset, len)?;
        self.hits.add(1);
        Ok(place)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;
    use crate::page_entry::PageState;

    const RANGE: HostRange = HostRange { addr: 0x7000_0000_0000, len: 3 * PAGE_BYTES };

    fn sent(file: BorrowedFd<'_>) -> OwnedFd {
        file.try_clone_to_owned().expect("a descriptor")
    }

    struct Owner {
        pool: File,
        entries: PageEntries,
        counters: AccessCounters,
        hits: PeerHits,
    }

    fn owner() -> (Owner, Framed) {
        // SAFETY: a string that ends, and flags.
        let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: just made.
        let pool = unsafe { File::from_raw_fd(fd) };
        pool.set_len(5 * PAGE_BYTES).expect("memory");
        let (entries, counters) = (PageEntries::new(3).expect("made"), AccessCounters::new(4).expect("made"));
        let hits = PeerHits::new().expect("made");
        let frames =
            Frames { file: pool.try_clone().expect("a descriptor").into(), offset: PAGE_BYTES, count: 4 };
        let tables = FrameTables {
            entries: sent(entries.file().expect("shared")),
            counters: sent(counters.file()),
            hits: sent(hits.file()),
        };
        let framed = Framed::new(RANGE, frames, tables);
        (Owner { pool, entries, counters, hits }, framed.expect("mapped"))
    }

    fn set(owner: &Owner, page: usize, state: PageState, frame: u32) {
        owner.entries[page].store(PageEntry::new(state, frame, 1).word(), Ordering::Release);
    }

    fn read(framed: &Framed, offset: u64, out: &mut [u8]) -> Result<(), Missing> {
        let local = HostRange { addr: out.as_mut_ptr() as u64, len: out.len() as u64 };
        framed.copy(Direction::Read, RANGE.addr.wrapping_add(offset), local)
    }

    fn write(framed: &Framed, offset: u64, data: &[u8]) -> Result<(), Missing> {
        let local = HostRange { addr: data.as_ptr() as u64, len: data.len() as u64 };
        framed.copy(Direction::Write, RANGE.addr.wrapping_add(offset), local)
    }

    #[test]
    fn pages_are_found_in_their_frames() {
        let (owner, framed) = owner();
        owner.pool.write_all_at(&[1; 4096], 3 * PAGE_BYTES).expect("written");
        owner.pool.write_all_at(&[2; 4096], PAGE_BYTES).expect("written");
        set(&owner, 0, PageState::Clean, 2);
        set(&owner, 1, PageState::Dirty, 0);
        let mut out = [0; 8];
        read(&framed, PAGE_BYTES - 4, &mut out).expect("both are mapped");
        assert_eq!(out, [1, 1, 1, 1, 2, 2, 2, 2]);
        assert_eq!([0, 1, 2, 3].map(|frame| owner.counters.get(frame)), [1, 0, 1, 0]);
        assert_eq!(read(&framed, 2 * PAGE_BYTES - 4, &mut out), Err(Missing), "page 2 is absent");
        assert_eq!(write(&framed, PAGE_BYTES - 4, &[9; 8]), Err(Missing), "page 0 is not writable");
        assert_eq!(write(&framed, PAGE_BYTES, &[9; 8]), Ok(()));
        let place = framed.place_of_atomic(RANGE.addr + PAGE_BYTES + 8).expect("writable");
        assert_eq!(place % 8, 0);
        assert_eq!(framed.place_of_atomic(RANGE.addr), Err(Missing));
        assert_eq!(owner.hits.total(), 4, "two pages read, one written, an atomic");
        let mut found = [0; 9];
        owner.pool.read_exact_at(&mut found, PAGE_BYTES).expect("read");
        assert_eq!(found, [9, 9, 9, 9, 9, 9, 9, 9, 2]);
    }

    /// The descriptors that this process has of a file.
    fn descriptors_of(file: BorrowedFd<'_>) -> usize {
        let id = |path: std::path::PathBuf| {
            std::fs::metadata(path).ok().map(|status| (status.dev(), status.ino()))
        };
        let wanted = id(format!("/proc/self/fd/{}", file.as_raw_fd()).into());
        let all = std::fs::read_dir("/proc/self/fd").expect("this process's descriptors");
        // Other tests close descriptors meanwhile.
        all.filter_map(|entry| id(entry.ok()?.path())).filter(|&found| Some(found) == wanted).count()
    }

    #[test]
    fn a_mapped_region_keeps_no_descriptor() {
        let (owner, _framed) = owner();
        let pool = owner.pool.as_fd();
        let entries = owner.entries.file().expect("shared");
        let counts = [pool, entries, owner.counters.file(), owner.hits.file()].map(descriptors_of);
        assert_eq!(counts, [1; 4], "the owner's");
    }

    #[test]
    fn entries_that_make_no_sense_and_what_is_withdrawn_are_refused() {
        let (owner, framed) = owner();
        let mut out = [0; 8];
        set(&owner, 0, PageState::Dirty, 4);
        assert_eq!(read(&framed, 0, &mut out), Err(Missing), "there are 4 frames");
        assert_eq!(read(&framed, 3 * PAGE_BYTES - 4, &mut out), Err(Missing), "beyond the region");
        assert_eq!(read(&framed, u64::MAX - 3, &mut out), Err(Missing));
        set(&owner, 0, PageState::Dirty, 3);
        assert_eq!(read(&framed, 0, &mut out), Ok(()));
        owner.entries.withdraw();
        assert_eq!(read(&framed, 0, &mut out), Err(Missing));
    }
}
