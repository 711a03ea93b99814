//! Lookup of the mappings of an address range in `/proc/self/maps`, see proc_pid_maps(5).

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::IntoRawFd;

use rustix::fs::{Mode, OFlags};
use terrace_hostmem::HostRange;

use crate::reserve;

const MAPS: &str = "/proc/self/maps";

/// All addresses.
pub(crate) const EVERYTHING: HostRange = HostRange { addr: 0, len: u64::MAX };

/// The kernel's identifier of a file in its list of mappings. Other interfaces may use other numbers, such as `stat` on
/// btrfs and overlayfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    major: u32,
    minor: u32,
    inode: u64,
}

impl FileId {
    /// The inode's number.
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// The device's numbers.
    pub(crate) fn device(&self) -> u64 {
        u64::from(self.major) << 32 | u64::from(self.minor)
    }

    /// Whether a file with these numbers from `stat` is certainly another file: it has the same device numbers, and
    /// another inode.
    pub fn is_surely_not(&self, device: u64, inode: u64) -> bool {
        (libc::major(device), libc::minor(device)) == (self.major, self.minor) && inode != self.inode
    }
}

/// One line of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapping<Path = Vec<u8>> {
    start: u64,
    end: u64,
    readable: bool,
    writable: bool,
    executable: bool,
    shared: bool,
    offset: u64,
    file: FileId,
    path: Path,
}

/// Adjacent mappings of adjacent parts of one file, with the same protection: created by one `mmap`, and possibly split
/// by memory locks since.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The address range, in whole pages.
    pub range: HostRange,
    /// The offset of the range in the file.
    pub file_offset: u64,
    /// Whether the mapping is writable.
    pub writable: bool,
    /// The file.
    pub file: FileId,
    /// The file's name as the kernel escapes it.
    pub path: Vec<u8>,
    /// The address range of the first mapping.
    pub first: HostRange,
}

/// The reason why a range cannot be tiered to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRun {
    /// The memory is not a shared file mapping, or not mapped.
    NoSharedFile,
    /// The range exceeds a shared file mapping.
    GoesBeyond,
}

impl fmt::Display for NoRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NoRun::NoSharedFile => "there is no shared, readable mapping of a file",
            NoRun::GoesBeyond => "the range exceeds one mapping of one file",
        })
    }
}

/// The run that covers a range.
///
/// # Errors
/// The list cannot be read.
pub fn find(range: HostRange) -> io::Result<Result<Run, NoRun>> {
    read_list(|lines| find_in(lines, range))
}

/// The files that have mappings.
///
/// # Errors
/// The list cannot be read.
pub fn files() -> io::Result<HashSet<FileId>> {
    Ok(list(EVERYTHING)?.iter().map(|mapping| mapping.file).collect())
}

/// The mappings that overlap a range, cut at its ends.
pub(crate) fn list(range: HostRange) -> io::Result<Vec<Mapping>> {
    read_list(|lines| list_in(lines, range))
}

fn read_list<T>(read: impl FnOnce(BufReader<File>) -> io::Result<T>) -> io::Result<T> {
    let list = reserve::open(|| File::open(MAPS))?;
    let result = read(BufReader::with_capacity(1 << 16, list));
    reserve::refill();
    result
}

/// [`each_overlap`] does not read beyond these bytes of a line, which include some 70 before the path.
pub(crate) const LINE_MAX: usize = 2048;

/// Passes the mappings that overlap a range to `step`, cut at the range's ends, until `step` returns false. Neither
/// allocates nor takes a lock, and makes the system calls directly.
///
/// # Errors
/// The list cannot be read.
pub(crate) fn each_overlap(range: HostRange, mut step: impl FnMut(Mapping<&[u8]>) -> bool) -> io::Result<()> {
    let open = || Ok(rustix::fs::open(c"/proc/self/maps", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?);
    let list = reserve::open(open)?;
    let end = range.addr.saturating_add(range.len);
    let read = |buffer: &mut [u8]| Ok(rustix::io::read(&list, buffer)?);
    let result = each_line(read, |line| match Mapping::parse_line(line) {
        Some(mapping) if mapping.start >= end => false,
        Some(mapping) if mapping.end > range.addr => step(mapping.cut(range.addr, end)),
        _ => true,
    });
    // The C library's close, which a drop would call, is a cancellation point.
    // SAFETY: a descriptor of ours that nobody uses any more.
    unsafe { rustix::io::close(list.into_raw_fd()) };
    reserve::refill();
    result
}

/// Passes the lines to `step`, without their newlines and cut at [`LINE_MAX`], until it returns false.
fn each_line(
    mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    mut step: impl FnMut(&[u8]) -> bool,
) -> io::Result<()> {
    let mut buffer = [0; LINE_MAX];
    let (mut filled, mut is_rest_of_line) = (0, false);
    loop {
        let count = read(&mut buffer[filled..])?;
        filled += count;
        let mut start = 0;
        while let Some(len) = buffer[start..filled].iter().position(|&byte| byte == b'\n') {
            if !is_rest_of_line && !step(&buffer[start..start + len]) {
                return Ok(());
            }
            is_rest_of_line = false;
            start += len + 1;
        }
        if count == 0 {
            return Ok(());
        }
        if start == 0 && filled == LINE_MAX {
            if !is_rest_of_line && !step(&buffer) {
                return Ok(());
            }
            (filled, is_rest_of_line) = (0, true);
        } else {
            buffer.copy_within(start..filled, 0);
            filled -= start;
        }
    }
}

fn list_in(mut list: impl BufRead, range: HostRange) -> io::Result<Vec<Mapping>> {
    let end = range.addr.saturating_add(range.len);
    let (mut found, mut line) = (Vec::new(), Vec::new());
    while next_line(&mut list, &mut line)? {
        let Some(mapping) = Mapping::parse(&line) else { continue };
        if mapping.start >= end {
            break;
        }
        if mapping.end > range.addr {
            found.push(mapping.cut(range.addr, end));
        }
    }
    Ok(found)
}

/// The file that is mapped at an address.
pub fn file_at(addr: u64) -> io::Result<Option<FileId>> {
    Ok(at(addr)?.map(|mapping| mapping.file))
}

/// The mapping at an address.
pub(crate) fn at(addr: u64) -> io::Result<Option<Mapping>> {
    read_list(|lines| find_line(lines, addr))
}

fn find_line(mut list: impl BufRead, addr: u64) -> io::Result<Option<Mapping>> {
    let mut line = Vec::new();
    while next_line(&mut list, &mut line)? {
        match Mapping::parse(&line) {
            Some(mapping) if mapping.end > addr => return Ok((mapping.start <= addr).then_some(mapping)),
            _ => {}
        }
    }
    Ok(None)
}

fn find_in(mut list: impl BufRead, range: HostRange) -> io::Result<Result<Run, NoRun>> {
    let Some(end) = range.addr.checked_add(range.len) else { return Ok(Err(NoRun::NoSharedFile)) };
    let mut run: Option<Run> = None;
    let mut line = Vec::new();
    while next_line(&mut list, &mut line)? {
        let Some(mapping) = Mapping::parse(&line) else { continue };
        if run.as_mut().is_some_and(|run| run.extend(&mapping)) {
            continue;
        }
        // The list is in the order of addresses: the first run that reaches the range is the only one that can cover
        // it.
        if run.as_ref().is_some_and(|run| run.end() > range.addr) || mapping.start >= end {
            break;
        }
        run = mapping.begins_run().then(|| Run::of(mapping));
    }
    Ok(match run {
        Some(run) if run.range.addr <= range.addr && run.end() > range.addr => run.checked(end),
        _ => Err(NoRun::NoSharedFile),
    })
}

/// Reads a line without its newline. Returns false at the end of the list. Names may contain any bytes but newlines.
pub(crate) fn next_line(list: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    let length = list.read_until(b'\n', line)?;
    if line.last() == Some(&b'\n') {
        line.pop();
    }
    Ok(length > 0)
}

impl Run {
    /// Whether a range of another run is also a part of this run, at the same offset of the same file.
    pub fn covers(&self, range: HostRange, other: &Run) -> bool {
        let place = |run: &Run| run.file_offset.wrapping_sub(run.range.addr);
        range.addr >= self.range.addr
            && range.addr.checked_add(range.len).is_some_and(|end| end <= self.end())
            && other.file == self.file
            && other.writable == self.writable
            && place(other) == place(self)
    }

    /// The run truncated to the end of the file, which may be within the last page or before it.
    pub fn cut_at(mut self, file_len: u64) -> Run {
        self.range.len = self.range.len.min(file_len.saturating_sub(self.file_offset));
        self
    }

    /// Whether the run overlaps the range.
    pub fn overlaps(&self, range: HostRange) -> bool {
        self.range.overlaps(range)
    }

    fn of(mapping: Mapping) -> Run {
        let range = HostRange { addr: mapping.start, len: mapping.end - mapping.start };
        let Mapping { offset: file_offset, writable, file, path, .. } = mapping;
        Run { range, file_offset, writable, file, path, first: range }
    }

    fn end(&self) -> u64 {
        self.range.addr + self.range.len
    }

    /// Appends the next mapping, if it is the file's next part.
    fn extend(&mut self, next: &Mapping) -> bool {
        let fits = next.begins_run()
            && next.start == self.end()
            && next.file == self.file
            && next.writable == self.writable
            && self.file_offset.checked_add(self.range.len) == Some(next.offset);
        if fits {
            self.range.len += next.end - next.start;
        }
        fits
    }

    fn checked(self, end: u64) -> Result<Run, NoRun> {
        if self.end() < end { Err(NoRun::GoesBeyond) } else { Ok(self) }
    }
}

impl<Path: AsRef<[u8]>> Mapping<Path> {
    /// The addresses.
    pub(crate) fn range(&self) -> HostRange {
        HostRange { addr: self.start, len: self.end - self.start }
    }

    /// Whether it is private memory without a file, for loads and stores alone. Not the main thread's stack, which grows.
    pub(crate) fn is_private_memory(&self) -> bool {
        let path = self.path.as_ref();
        let is_named = path.starts_with(b"[") && path != b"[heap]" && !path.starts_with(b"[anon:");
        let is_data = self.readable && self.writable && !self.executable;
        is_data && !self.shared && self.file.inode == 0 && !is_named
    }

    /// Whether it is private memory without a file that nobody can access.
    pub(crate) fn is_reserved(&self) -> bool {
        let is_accessible = self.readable || self.writable || self.executable;
        !is_accessible && !self.shared && self.file.inode == 0 && !self.path.as_ref().starts_with(b"[v")
    }

    /// Where in the file the mapping begins.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether it is a shared mapping.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared
    }

    /// Whether both are mappings of one file. Numbers alone do not tell on all file systems.
    pub(crate) fn is_of_same_file(&self, other: &Mapping) -> bool {
        self.file == other.file && self.path.as_ref() == other.path
    }

    /// The file's name as the kernel escapes it.
    pub(crate) fn path(&self) -> &[u8] {
        self.path.as_ref()
    }

    /// The file's identifier.
    pub(crate) fn file(&self) -> FileId {
        self.file
    }

    /// The rights to access it, as `mmap(2)` takes them.
    pub(crate) fn rights(&self) -> libc::c_int {
        let right = |is_given, right| if is_given { right } else { libc::PROT_NONE };
        right(self.readable, libc::PROT_READ)
            | right(self.writable, libc::PROT_WRITE)
            | right(self.executable, libc::PROT_EXEC)
    }

    fn cut(mut self, start: u64, end: u64) -> Self {
        let before = start.saturating_sub(self.start);
        (self.start, self.offset, self.end) = (self.start + before, self.offset + before, self.end.min(end));
        self
    }
}

impl<'a> Mapping<&'a [u8]> {
    /// `55d0c8a00000-55d0c8a21000 rw-s 00001000 fd:02 1234     /name with spaces`
    fn parse_line(line: &'a [u8]) -> Option<Mapping<&'a [u8]>> {
        let mut rest = line;
        let mut field = || {
            let length = rest.iter().position(|&byte| byte == b' ').unwrap_or(rest.len());
            let (field, after) = rest.split_at(length);
            rest = after.get(1..).unwrap_or_default();
            std::str::from_utf8(field).ok()
        };
        let (start, end) = field()?.split_once('-')?;
        let permissions = field()?.as_bytes();
        let offset = field()?;
        let (major, minor) = field()?.split_once(':')?;
        let inode = field()?;
        let padding = rest.iter().position(|&byte| byte != b' ').unwrap_or(rest.len());
        let mapping = Mapping {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            readable: permissions.first() == Some(&b'r'),
            writable: permissions.get(1) == Some(&b'w'),
            executable: permissions.get(2) == Some(&b'x'),
            shared: permissions.get(3) == Some(&b's'),
            offset: u64::from_str_radix(offset, 16).ok()?,
            file: FileId {
                major: u32::from_str_radix(major, 16).ok()?,
                minor: u32::from_str_radix(minor, 16).ok()?,
                inode: inode.parse().ok()?,
            },
            path: &rest[padding..],
        };
        (mapping.start < mapping.end).then_some(mapping)
    }
}

impl Mapping {
    pub(crate) fn parse(line: &[u8]) -> Option<Mapping> {
        let mapping = Mapping::parse_line(line)?;
        let path = mapping.path.to_owned();
        let Mapping { start, end, readable, writable, executable, shared, offset, file, .. } = mapping;
        Some(Mapping { start, end, readable, writable, executable, shared, offset, file, path })
    }

    fn begins_run(&self) -> bool {
        // These are the kernel's names for shared memory without a file.
        let made_up = self.path.starts_with(b"/dev/zero") || self.path.starts_with(b"/SYSV");
        self.shared && self.readable && self.file.inode != 0 && self.path.starts_with(b"/") && !made_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "\
10000-12000 r-xp 00000000 fe:00 77                         /usr/bin/program
20000-24000 rw-s 00001000 fe:00 1234                       /data/a name  with\\012spaces (deleted)
24000-25000 rw-s 00005000 fe:00 1234                       /data/a name  with\\012spaces (deleted)
25000-26000 rw-s 00006000 fe:00 9                          /data/other
26000-27000 rw-s 00009000 fe:00 9                          /data/other
27000-28000 r--s 0000a000 fe:00 9                          /data/other
30000-31000 rw-p 00000000 00:00 0
40000-41000 rw-p 00001000 fe:00 1234                       /data/private
50000-52000 rw-s 00000000 00:01 5                          /dev/zero (deleted)
60000-61000 -w-s 00000000 00:01 8                          /memfd:x (deleted)
7ffd0000-7ffd1000 rw-p 00000000 00:00 0                    [stack]
";

    fn run(addr: u64, len: u64) -> Result<Run, NoRun> {
        find_in(LIST.as_bytes(), HostRange { addr, len }).unwrap()
    }

    #[test]
    fn adjacent_parts_of_a_file_are_one_run() {
        let found = run(0x21001, 0x3001).unwrap();
        assert_eq!(found.range, HostRange { addr: 0x20000, len: 0x5000 });
        assert_eq!(found.first, HostRange { addr: 0x20000, len: 0x4000 });
        assert_eq!((found.file_offset, found.writable, found.file.inode), (0x1000, true, 1234));
        assert_eq!(found.path, b"/data/a name  with\\012spaces (deleted)");
        assert_eq!(run(0x24fff, 1).unwrap(), found);
    }

    #[test]
    fn another_file_offset_or_protection_ends_a_run() {
        assert_eq!(run(0x24fff, 2), Err(NoRun::GoesBeyond));
        assert_eq!(run(0x25000, 0x1000).unwrap().range.len, 0x1000);
        assert_eq!(run(0x25000, 0x1001), Err(NoRun::GoesBeyond));
        assert_eq!(run(0x26000, 0x1001), Err(NoRun::GoesBeyond));
        assert!(!run(0x27000, 0x1000).unwrap().writable);
        assert_eq!(run(0x27000, 0x9000), Err(NoRun::GoesBeyond));
    }

    #[test]
    fn a_run_covers_the_same_part_of_the_same_file() {
        let whole = run(0x20000, 1).unwrap();
        let range = |addr, len| HostRange { addr, len };
        assert!(whole.covers(range(0x20001, 0x4fff), &whole));
        assert!(!whole.covers(range(0x20001, 0x5000), &whole) && !whole.covers(range(0x1ffff, 1), &whole));
        // Another part of the file or another file is mapped there, or the mapping is no longer writable.
        assert!(!whole.covers(range(0x20000, 1), &Run { file_offset: 0x2000, ..whole.clone() }));
        assert!(!whole.covers(range(0x20000, 1), &Run { writable: false, ..whole.clone() }));
        assert!(
            !whole.covers(range(0x20000, 1), &Run { file: run(0x25000, 1).unwrap().file, ..whole.clone() })
        );
        let larger = Run { range: range(0x1f000, 0x9000), file_offset: 0, ..whole.clone() };
        assert!(whole.covers(range(0x20000, 0x5000), &larger));
        let cut = whole.clone().cut_at(0x1000 + 0x4010);
        assert!(cut.covers(range(0x24000, 0x10), &whole) && !cut.covers(range(0x24000, 0x11), &whole));
        assert_eq!(whole.cut_at(0x100).range.len, 0);
    }

    #[test]
    fn other_memory_has_no_file() {
        for (addr, len) in
            [(0x10000, 16), (0x30000, 16), (0x40000, 16), (0x50000, 16), (0x60000, 1), (0, 1), (u64::MAX, 9)]
        {
            assert_eq!(run(addr, len), Err(NoRun::NoSharedFile), "{addr:#x}");
        }
        // The range begins before the mapping.
        assert_eq!(run(0x1ffff, 2), Err(NoRun::NoSharedFile));
    }

    #[test]
    fn what_overlaps_a_range_is_listed_and_cut() {
        let list = |addr, len| list_in(LIST.as_bytes(), HostRange { addr, len }).unwrap();
        let found = list(0x23000, 0x2800);
        let places: Vec<_> =
            found.iter().map(|mapping| (mapping.start, mapping.end, mapping.offset)).collect();
        assert_eq!(
            places,
            [(0x23000, 0x24000, 0x4000), (0x24000, 0x25000, 0x5000), (0x25000, 0x25800, 0x6000)]
        );
        let same: Vec<bool> = found.iter().map(|mapping| mapping.is_of_same_file(&found[0])).collect();
        assert_eq!(same, [true, true, false]);
        assert!(found[0].is_shared() && !list(0x40000, 1)[0].is_shared());
        assert_eq!(found[0].rights(), libc::PROT_READ | libc::PROT_WRITE);
        assert!(list(0x13000, 0x1000).is_empty() && list(u64::MAX, 9).is_empty());
    }

    #[test]
    fn private_memory_has_neither_a_file_nor_a_purpose_of_the_kernel() {
        let is_private = |line: &str| Mapping::parse(line.as_bytes()).unwrap().is_private_memory();
        for line in ["1-2 rw-p 0 00:00 0", "1-2 rw-p 0 00:00 0   [heap]", "1-2 rw-p 0 00:00 0  [anon:pool]"] {
            assert!(is_private(line), "{line}");
        }
        for line in [
            "1-2 rw-p 0 00:00 0   [stack]",
            "1-2 r--p 0 00:00 0",
            "1-2 -w-p 0 00:00 0",
            "1-2 rwxp 0 00:00 0",
            "1-2 rw-s 0 00:01 7 /dev/zero (deleted)",
            "1-2 rw-p 0 00:0f 7 /anon_hugepage (deleted)",
            "1-2 rw-p 0 fe:00 7 /lib/x.so",
        ] {
            assert!(!is_private(line), "{line}");
        }
    }

    #[test]
    fn lines_that_are_read_in_pieces_are_whole_and_long_ones_are_cut() {
        let long = [b"1-2 rw-s 0 1:2 3 /".as_slice(), &[b'x'; 3 * LINE_MAX]].concat();
        for piece in [1, 7, 100, LINE_MAX, 10 * LINE_MAX] {
            let text = [LIST.as_bytes(), &long, b"\n", LIST.as_bytes(), &long[..LINE_MAX], b"\n"].concat();
            let (mut rest, mut lines) = (text.as_slice(), Vec::new());
            let read = |buffer: &mut [u8]| {
                let (now, later) = rest.split_at(rest.len().min(piece).min(buffer.len()));
                buffer[..now.len()].copy_from_slice(now);
                rest = later;
                Ok(now.len())
            };
            each_line(read, |line| {
                lines.push(line.to_owned());
                true
            })
            .unwrap();
            let listed: Vec<_> = LIST.lines().map(|line| line.as_bytes().to_owned()).collect();
            let cut = vec![long[..LINE_MAX].to_owned()];
            assert_eq!(lines, [listed.clone(), cut.clone(), listed, cut].concat(), "pieces of {piece}");
        }
    }

    #[test]
    fn malformed_lines_are_ignored() {
        for line in [
            "",
            "x",
            "1-2",
            "2-1 rw-s 0 1:2 3 /x",
            "g-2 rw-s 0 1:2 3 /x",
            "1-2 rw-s 0 1 3 /x",
            "1-2 rw-s 0 1:2 -3",
        ] {
            assert_eq!(Mapping::parse(line.as_bytes()), None, "{line}");
        }
        assert_eq!(Mapping::parse(b"1-2 rw-s 0 1:2 3 \xff/").unwrap().path, b"\xff/");
        assert_eq!(Mapping::parse(b"1-2 rw-s 0 1:2 3").unwrap().path, b"");
    }
}
