//! Opening of the file behind a mapping again: the program's descriptor may be closed, or lack the access mode.
//!
//! There are three candidate paths: the kernel's link for each mapping, which needs privileges; the file's name, which
//! may belong to another file by now; and the program's descriptors, if one of them still refers to the file. The
//! opened file is therefore mapped briefly, and the kernel must list that mapping with the same file.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::Arc;

use terrace_hostmem::PAGE_BYTES;
use terrace_shm::file_system;
use terrace_sync::Mutex;
use terrace_vm::maps::{FileId, Run, file_at};

/// File systems whose files can be mapped, but are not storage.
const UNSUITABLE: [(i64, &str); 3] = [(0x6265_6572, "sysfs"), (0x9fa0, "proc"), (0x6462_6720, "debugfs")];

/// The purpose of opening a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A same-host peer maps the file.
    Mapping,
    /// The pager reads and writes the file, whose pages have the base size.
    Paging,
}

/// The reason why a file cannot be used.
#[derive(Debug)]
pub enum NoBacking {
    /// Neither a regular file nor a block device, or on an unsuitable file system.
    Unsuitable(&'static str),
    /// No candidate path led to the file. Contains the last path's error.
    Unreachable(io::Error),
    /// The file was opened and cannot be read.
    Unreadable(io::Error),
}

impl fmt::Display for NoBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoBacking::Unsuitable(what) => write!(f, "the file is on or of the kind {what}"),
            NoBacking::Unreachable(error) => write!(f, "the file cannot be opened again: {error}"),
            NoBacking::Unreadable(error) => write!(f, "the file cannot be read: {error}"),
        }
    }
}

/// A file of the program that was opened again. Closing any descriptor of a file releases the POSIX locks that the process
/// has on it. So when this is dropped while the process has some, the descriptor stays open, in [`KEPT`].
#[derive(Debug)]
pub struct ProgramFile {
    file: Arc<OwnedFd>,
    id: OpenedId,
}

/// Device, inode, and whether the file is open for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OpenedId {
    dev: u64,
    inode: u64,
    writable: bool,
}

/// Files that stay open for the process's POSIX locks. They are used again: otherwise each registration would leave one. The
/// lock is never waited for, because a forked child may find it held.
static KEPT: Mutex<Vec<(OpenedId, Arc<OwnedFd>)>> = Mutex::new(Vec::new());

impl ProgramFile {
    /// Opens a path with this status.
    fn open(path: &Path, status: &Metadata, writable: bool) -> io::Result<ProgramFile> {
        let id = OpenedId { dev: status.dev(), inode: status.ino(), writable };
        if let Some(file) = take_kept(id) {
            return Ok(ProgramFile { file, id });
        }
        let file = OpenOptions::new().read(true).write(writable).open(path)?;
        Ok(ProgramFile { file: Arc::new(file.into()), id })
    }

    /// The descriptor, for users that end before this does.
    pub fn shared(&self) -> Arc<OwnedFd> {
        self.file.clone()
    }

    /// A descriptor that is closed whatever the locks are.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        self.file.try_clone()
    }
}

impl Drop for ProgramFile {
    fn drop(&mut self) {
        if is_locked_by_us(self.id.inode) {
            match KEPT.try_lock() {
                Some(mut kept) => kept.push((self.id, self.file.clone())),
                None => std::mem::forget(self.file.clone()),
            }
        }
    }
}

fn take_kept(id: OpenedId) -> Option<Arc<OwnedFd>> {
    let mut kept = KEPT.try_lock()?;
    let at = kept.iter().position(|(kept, _)| *kept == id)?;
    Some(kept.swap_remove(at).1)
}

/// Opens the file of a run for reading, and for writing if the mapping is writable. Returns the file and its length.
///
/// # Errors
/// The reason why no file could be opened.
pub fn open(run: &Run, purpose: Purpose) -> Result<(ProgramFile, u64), NoBacking> {
    let mut failure = NoBacking::Unreachable(io::ErrorKind::NotFound.into());
    for path in candidates(run) {
        match open_same(&path, run, purpose) {
            Ok(Some(file)) => return check_readable(file, run),
            Ok(None) => {}
            // EACCES for a file is more informative than ENOENT for a path.
            Err(NoBacking::Unreachable(error)) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// The candidate paths. The link comes first because no process can move it.
fn candidates(run: &Run) -> impl Iterator<Item = PathBuf> {
    let (start, end) = (run.first.addr, run.first.addr + run.first.len);
    let link = PathBuf::from(format!("/proc/self/map_files/{start:x}-{end:x}"));
    let named = [Some(run.path.clone()), with_newlines(&run.path)];
    let named = named.into_iter().flatten().map(|name| PathBuf::from(OsStr::from_bytes(&name)));
    [link].into_iter().chain(named.collect::<Vec<_>>()).chain(descriptors(run.file.inode()))
}

/// The kernel writes a newline in a name as `\012`, and a backslash as it is. So `\012` is ambiguous.
fn with_newlines(path: &[u8]) -> Option<Vec<u8>> {
    const ESCAPED: &[u8] = b"\\012";
    let mut name = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some(at) = rest.windows(ESCAPED.len()).position(|bytes| bytes == ESCAPED) {
        name.extend_from_slice(&rest[..at]);
        name.push(b'\n');
        rest = &rest[at + ESCAPED.len()..];
    }
    name.extend_from_slice(rest);
    (name != path).then_some(name)
}

/// Paths of the program's descriptors of files with this inode number. Opening such a path creates a new open file
/// description, even if the file has no name.
fn descriptors(inode: u64) -> impl Iterator<Item = PathBuf> {
    let list = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
    let paths = list.flatten().map(|entry| entry.path());
    paths.filter(move |path| path.metadata().is_ok_and(|status| status.ino() == inode))
}

/// Opens a path; `None` if it is another file.
fn open_same(path: &Path, run: &Run, purpose: Purpose) -> Result<Option<ProgramFile>, NoBacking> {
    // `stat` comes first: opening a device or a pipe can have effects, or block.
    let status = path.metadata().map_err(NoBacking::Unreachable)?;
    let kind = status.file_type();
    if !(kind.is_file() || kind.is_block_device()) || run.file.is_surely_not(status.dev(), status.ino()) {
        return Ok(None);
    }
    let file = ProgramFile::open(path, &status, run.writable).map_err(NoBacking::Unreachable)?;
    let system = file_system(file.file.as_fd()).map_err(NoBacking::Unreadable)?;
    if let Some((_, name)) = UNSUITABLE.iter().find(|(kind, _)| *kind == system.kind) {
        return Err(NoBacking::Unsuitable(name));
    }
    if system.page_bytes != PAGE_BYTES && purpose == Purpose::Paging {
        return Err(NoBacking::Unsuitable("hugetlbfs (its files cannot be written)"));
    }
    let mapped = mapped_id(&file.file, system.page_bytes as usize).map_err(NoBacking::Unreachable)?;
    Ok((mapped == Some(run.file)).then_some(file))
}

/// The kernel's identifier of the mapped file, whose pages have this size.
fn mapped_id(file: &OwnedFd, page_bytes: usize) -> io::Result<Option<FileId>> {
    // MAP_NORESERVE avoids the reservation of a huge page.
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address that the kernel chooses; PROT_NONE allows no access.
    let addr = unsafe { libc::mmap(null_mut(), page_bytes, libc::PROT_NONE, flags, file.as_raw_fd(), 0) };
    if addr == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let id = file_at(addr as u64);
    // SAFETY: the mapping from above. The interposed function would take the lock of the table of mappings, which is held.
    unsafe { libc::syscall(libc::SYS_munmap, addr, page_bytes) };
    id
}

/// Whether this process holds POSIX locks on a file with this inode number.
pub fn is_locked_by_us(inode: u64) -> bool {
    match std::fs::read_to_string("/proc/locks") {
        Ok(list) => list.lines().any(|line| is_our_lock(line, std::process::id(), inode)),
        // If unknown, the descriptor is kept open.
        Err(_) => true,
    }
}

/// `1: POSIX  ADVISORY  WRITE 1234 fe:00:5678 0 EOF`
fn is_our_lock(line: &str, pid: u32, inode: u64) -> bool {
    let mut words = line.split_whitespace().filter(|word| *word != "->").skip(1);
    let is_posix = words.next() == Some("POSIX");
    let owner = words.nth(2).and_then(|word| word.parse().ok());
    let file = words.next().and_then(|word| word.rsplit(':').next()?.parse().ok());
    is_posix && owner == Some(pid) && file == Some(inode)
}

/// Checks that the file can be read.
fn check_readable(file: ProgramFile, run: &Run) -> Result<(ProgramFile, u64), NoBacking> {
    // SAFETY: the descriptor is open as long as `file`, and is not closed by this.
    let mut open = ManuallyDrop::new(unsafe { File::from_raw_fd(file.file.as_raw_fd()) });
    // A read at the end of a file returns nothing, without an error.
    open.read_at(&mut [0], run.file_offset).map_err(NoBacking::Unreadable)?;
    // A seek also works for block devices, for which `stat` reports no size.
    let file_len = open.seek(SeekFrom::End(0)).map_err(NoBacking::Unreadable)?;
    Ok((file, file_len))
}

#[cfg(test)]
mod tests {
    use std::ffi::{CStr, c_void};
    use std::os::fd::RawFd;

    use terrace_hostmem::HostRange;

    use super::*;
    use terrace_vm::maps::{NoRun, find};

    fn open(run: &Run) -> Result<(ProgramFile, u64), NoBacking> {
        super::open(run, Purpose::Paging)
    }

    /// A mapping of eight pages of a file from its second page.
    struct Mapped(*mut c_void);

    impl Mapped {
        const LEN: usize = 8 * PAGE_BYTES as usize;

        fn new(file: &File, protection: i32, flags: i32) -> Mapped {
            // SAFETY: a new mapping of an open file.
            let addr = unsafe {
                libc::mmap(null_mut(), Mapped::LEN, protection, flags, file.as_raw_fd(), PAGE_BYTES as i64)
            };
            assert_ne!(addr, libc::MAP_FAILED, "{}", io::Error::last_os_error());
            Mapped(addr)
        }

        fn shared(file: &File) -> Mapped {
            Mapped::new(file, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED)
        }

        fn part(&self, offset: u64, len: u64) -> HostRange {
            HostRange { addr: self.0 as u64 + offset, len }
        }

        fn run(&self) -> Run {
            find(self.part(1, Mapped::LEN as u64 - 1)).unwrap().unwrap()
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: made by `new`; nothing uses it.
            unsafe { libc::munmap(self.0, Mapped::LEN) };
        }
    }

    /// A temporary directory, removed at the end.
    struct Directory(PathBuf);

    impl Directory {
        fn new(parent: &Path, name: &str) -> Directory {
            let path = parent.join(format!("terrace-backing-{}-{name}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Directory(path)
        }

        fn file(&self, name: &str, content: &str) -> File {
            let path = self.0.join(name);
            let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
            file.write_all_at(content.as_bytes(), PAGE_BYTES).unwrap();
            file.set_len(16 * PAGE_BYTES).unwrap();
            file
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn directory(name: &str) -> Directory {
        Directory::new(&std::env::temp_dir(), name)
    }

    fn content((file, _): (ProgramFile, u64), run: &Run) -> String {
        let mut bytes = [0; 5];
        File::from(file.duplicate().unwrap()).read_exact_at(&mut bytes, run.file_offset).unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    fn anonymous(name: &CStr, flags: u32) -> File {
        // SAFETY: a C string and flags.
        let fd: RawFd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        // SAFETY: just opened.
        unsafe { File::from_raw_fd(fd) }
    }

    /// The run in a process without privileges, which cannot use the kernel's link.
    fn without_link(mut run: Run) -> Run {
        run.first = HostRange { addr: PAGE_BYTES, len: PAGE_BYTES };
        run
    }

    #[test]
    fn a_file_is_found_by_any_name() {
        let names = [
            "plain",
            "with  spaces ",
            "line\nend",
            "back\\012slash",
            "both\n\\012",
            "gone (deleted)",
            "\u{e9}\t",
        ];
        let directory = directory("names");
        for name in names {
            let file = directory.file(name, "right");
            let mapped = Mapped::shared(&file);
            drop(file);
            let run = mapped.run();
            assert_eq!((run.file_offset, run.range), (PAGE_BYTES, mapped.part(0, Mapped::LEN as u64)));
            assert_eq!(content(open(&run).unwrap(), &run), "right", "{name:?}");
            if name != "both\n\\012" {
                assert_eq!(content(open(&without_link(run.clone())).unwrap(), &run), "right", "{name:?}");
            }
        }
    }

    #[test]
    fn a_deleted_file_is_found_while_it_is_open() {
        let directory = directory("deleted");
        let file = directory.file("data", "right");
        let mapped = Mapped::shared(&file);
        std::fs::remove_file(directory.0.join("data")).unwrap();
        // Another file has its name now.
        let _other = directory.file("data", "wrong");
        let run = without_link(mapped.run());
        assert_eq!(content(open(&run).unwrap(), &run), "right");
        drop(file);
        assert!(matches!(open(&run), Err(NoBacking::Unreachable(_))));
    }

    #[test]
    fn a_replaced_file_is_not_mistaken_for_the_mapped_one() {
        let directory = directory("replaced");
        let mapped = Mapped::shared(&directory.file("data", "right"));
        let _other = directory.file("new", "wrong");
        std::fs::rename(directory.0.join("new"), directory.0.join("data")).unwrap();
        let run = mapped.run();
        assert!(matches!(open(&without_link(run.clone())), Err(NoBacking::Unreachable(_))));
        match open(&run) {
            Ok(file) => assert_eq!(content(file, &run), "right"),
            Err(error) => assert!(matches!(error, NoBacking::Unreachable(_)), "{error}"),
        }
    }

    #[test]
    fn anonymous_and_tmpfs_files_are_usable() {
        let directory = Directory::new(Path::new("/dev/shm"), "tmpfs");
        for file in [anonymous(c"terrace test", 0), directory.file("data", "right")] {
            file.write_all_at(b"right", PAGE_BYTES).unwrap();
            let mapped = Mapped::shared(&file);
            for run in [mapped.run(), without_link(mapped.run())] {
                assert_eq!(content(open(&run).unwrap(), &run), "right");
            }
        }
    }

    #[test]
    fn read_only_mappings_open_the_file_for_reading() {
        let directory = directory("read-only");
        let mapped = Mapped::new(&directory.file("data", "right"), libc::PROT_READ, libc::MAP_SHARED);
        let run = mapped.run();
        assert!(!run.writable);
        let (file, file_len) = open(&run).unwrap();
        assert_eq!(file_len, 16 * PAGE_BYTES);
        let file = File::from(file.duplicate().unwrap());
        assert!(file.write_all_at(b"x", 0).is_err());
    }

    #[test]
    fn memory_without_a_shared_file_is_not_used() {
        let directory = directory("private");
        let file = directory.file("data", "right");
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let private = Mapped::new(&file, protection, libc::MAP_PRIVATE);
        let inaccessible = Mapped::new(&file, libc::PROT_NONE, libc::MAP_SHARED);
        let unnamed = Mapped::new(&File::open("/dev/zero").unwrap(), libc::PROT_READ, libc::MAP_SHARED);
        for mapped in [private, inaccessible, unnamed] {
            assert_eq!(find(mapped.part(0, 1)).unwrap(), Err(NoRun::NoSharedFile));
        }
    }

    #[test]
    fn a_mapping_in_pieces_is_one_run() {
        let directory = directory("pieces");
        let mapped = Mapped::shared(&directory.file("data", "right"));
        let whole = mapped.run();
        // A lock on a part splits the mapping in three.
        // SAFETY: memory that is mapped.
        assert_eq!(unsafe { libc::mlock(mapped.0.wrapping_byte_add(2 << 12), 1 << 12) }, 0);
        let cut = mapped.run();
        assert_eq!((cut.range, cut.file_offset), (whole.range, whole.file_offset));
        assert_eq!(cut.first.len, 2 << 12);
        assert_eq!(content(open(&cut).unwrap(), &cut), "right");
        // SAFETY: as above; nothing uses it.
        assert_eq!(unsafe { libc::munmap(mapped.0.wrapping_byte_add(4 << 12), 1 << 12) }, 0);
        assert_eq!(find(mapped.part(0, Mapped::LEN as u64)).unwrap(), Err(NoRun::GoesBeyond));
        assert_eq!(find(mapped.part(5, 4096)).unwrap().unwrap().range, mapped.part(0, 4 << 12));
    }

    #[test]
    fn files_of_huge_pages_are_for_mapping_only() {
        let huge = anonymous(c"terrace huge", libc::MFD_HUGETLB);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let len = 2 << 20;
        // SAFETY: a new mapping. Nothing is reserved or touched, so the system need not have huge pages.
        let addr = unsafe {
            libc::mmap(
                null_mut(),
                len,
                protection,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                huge.as_raw_fd(),
                0,
            )
        };
        assert_ne!(addr, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        let run = find(HostRange { addr: addr as u64, len: 1 }).unwrap().unwrap();
        assert!(matches!(open(&run), Err(NoBacking::Unsuitable(_))));
        super::open(&run, Purpose::Mapping).expect("opened");
        let list = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert_eq!(
            list.matches("terrace huge").count(),
            1,
            "the mapping for identification was not removed: {list}"
        );
        // SAFETY: nothing uses it.
        unsafe { libc::munmap(addr, len) };
    }

    #[test]
    fn a_block_device_is_usable() {
        let devices = std::fs::read_dir("/dev").unwrap().flatten().map(|entry| entry.path());
        let disk =
            devices.filter(|path| path.metadata().is_ok_and(|status| status.file_type().is_block_device()));
        let Some(file) = disk
            .filter_map(|path| File::open(path).ok())
            .find(|file| file.read_at(&mut [0], 4096).is_ok_and(|count| count == 1))
        else {
            return eprintln!("no readable block device: not tested");
        };
        let mapped = Mapped::new(&file, libc::PROT_READ, libc::MAP_SHARED);
        for run in [mapped.run(), without_link(mapped.run())] {
            assert!(open(&run).unwrap().1 > PAGE_BYTES);
        }
    }

    #[test]
    fn posix_locks_of_the_process_are_found() {
        const LINE: &str = "12: POSIX  ADVISORY  WRITE 1234 fe:00:5678 0 EOF";
        assert!(is_our_lock(LINE, 1234, 5678));
        assert!(!is_our_lock(LINE, 123, 5678) && !is_our_lock(LINE, 1234, 567));
        assert!(!is_our_lock("12: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF", 1234, 5678));
        assert!(!is_our_lock("12: POSIX", 1234, 5678) && !is_our_lock("", 1234, 5678));

        let directory = directory("locks");
        let file = directory.file("data", "right");
        let inode = file.metadata().unwrap().ino();
        assert!(!is_locked_by_us(inode));
        // SAFETY: integers only.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_WRLCK as i16;
        // SAFETY: an open descriptor and a structure that is read.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const lock) }, 0);
        assert!(is_locked_by_us(inode));
        let mapped = Mapped::shared(&file);
        drop(open(&mapped.run()).unwrap());
        assert!(is_locked_by_us(inode), "a descriptor of the file was closed");

        let before = descriptors(inode).count();
        for _ in 0..20 {
            let both = [open(&mapped.run()).unwrap(), open(&mapped.run()).unwrap()];
            assert_ne!(both[0].0.file.as_raw_fd(), both[1].0.file.as_raw_fd());
        }
        assert_eq!(descriptors(inode).count(), before + 1, "the most at a time stay open");
        assert!(is_locked_by_us(inode));
    }

    #[test]
    fn escaped_newlines_are_decoded() {
        assert_eq!(with_newlines(b"/a\\012b\\012").as_deref(), Some(&b"/a\nb\n"[..]));
        assert_eq!(with_newlines(b"/a\\01"), None);
    }
}
