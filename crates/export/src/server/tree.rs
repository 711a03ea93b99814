//! The exported directory: system calls on its files.
//!
//! Every name is resolved by `openat2(2)` beneath the directory, without symbolic links that lead out, magic links and other
//! file systems. A file is held by an `O_PATH` descriptor. Calls that need another kind of descriptor, or have no form that
//! takes one, name the file by its entry in `/proc/self/fd`, which the kernel resolves to the file itself.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    Access, AtFlags, CWD, FileType, Gid, Mode, OFlags, RawDir, RenameFlags, ResolveFlags, SeekFrom, Statx,
    StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid,
};
use rustix::io::Errno;

use crate::proto::{
    Attributes, DirectoryEntry, DirectoryPage, FileId, FileKind, FileSystem, HEADER_BYTES, MESSAGE_BYTES_MAX,
    NAME_BYTES_MAX, OpenAccess, RenameMode, SetAttributes, SetTime, Text, Timestamp,
};

/// How every path of a client is resolved.
const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS).union(ResolveFlags::NO_XDEV);
/// How a single name is resolved.
const NAME: ResolveFlags = BENEATH.union(ResolveFlags::NO_SYMLINKS);
/// Bytes of an entry of a directory page without its name, at most.
const ENTRY_BYTES_MAX: usize = 160;
/// Bytes of the buffer for names from the kernel.
const NAMES_BYTES: usize = 8 << 10;

/// Checks that a name is a single component.
pub fn check_name(name: &Text) -> io::Result<&[u8]> {
    if name.0.len() > NAME_BYTES_MAX {
        return Err(Errno::NAMETOOLONG.into());
    }
    if name.is_component() { Ok(&name.0) } else { Err(Errno::INVAL.into()) }
}

/// The path by which the kernel finds the file of a descriptor.
pub fn by_descriptor(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Opens the exported directory.
pub fn open_root(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// The file of a name. Symbolic links are not followed.
pub fn lookup(parent: BorrowedFd<'_>, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(parent, name, flags, Mode::empty(), NAME)?)
}

/// The file of a path relative to the export; an empty one is the directory itself.
pub fn lookup_path(root: BorrowedFd<'_>, path: &[u8], follow: bool) -> io::Result<OwnedFd> {
    if path.contains(&0) {
        return Err(Errno::INVAL.into());
    }
    let path = if path.is_empty() { b"." } else { path };
    let mut flags = OFlags::PATH | OFlags::CLOEXEC;
    flags.set(OFlags::NOFOLLOW, !follow);
    Ok(rustix::fs::openat2(root, path, flags, Mode::empty(), BENEATH)?)
}

/// A file's attributes.
pub fn attributes(file: BorrowedFd<'_>) -> io::Result<Attributes> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    Ok(attributes_of(&rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted)?))
}

/// A file's access control list as the kernel has it (`acl(5)`). `None` if its mode says everything.
///
/// # Errors
/// The system's.
pub fn access_control_list(file: BorrowedFd<'_>) -> io::Result<Option<Vec<u8>>> {
    /// A value of an extended attribute is no longer (`XATTR_SIZE_MAX`).
    const BYTES_MAX: usize = 64 << 10;
    let read = |bytes: &mut [u8]| rustix::fs::getxattr(by_descriptor(file), "system.posix_acl_access", bytes);
    let mut bytes = vec![0; 256];
    let found = read(&mut bytes).or_else(|error| match error {
        Errno::RANGE => {
            bytes.resize(BYTES_MAX, 0);
            read(&mut bytes)
        }
        error => Err(error),
    });
    match found {
        Ok(len) => {
            bytes.truncate(len);
            Ok(Some(bytes))
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn attributes_of(statx: &Statx) -> Attributes {
    let time =
        |time: &rustix::fs::StatxTimestamp| Timestamp { seconds: time.tv_sec, nanoseconds: time.tv_nsec };
    let nanoseconds = |time: &rustix::fs::StatxTimestamp| {
        (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec.into())
    };
    let has_birth = StatxFlags::from_bits_retain(statx.stx_mask).contains(StatxFlags::BTIME);
    let kind = match FileType::from_raw_mode(statx.stx_mode.into()) {
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::SymbolicLink,
        FileType::Fifo => FileKind::Fifo,
        FileType::Socket => FileKind::Socket,
        FileType::CharacterDevice => FileKind::CharacterDevice,
        FileType::BlockDevice => FileKind::BlockDevice,
        _ => FileKind::Regular,
    };
    Attributes {
        id: FileId {
            dev: rustix::fs::makedev(statx.stx_dev_major, statx.stx_dev_minor),
            ino: statx.stx_ino,
            generation: if has_birth { nanoseconds(&statx.stx_btime) } else { 0 },
        },
        kind,
        mode: u32::from(statx.stx_mode) & 0o7777,
        links: statx.stx_nlink.into(),
        uid: statx.stx_uid,
        gid: statx.stx_gid,
        rdev: rustix::fs::makedev(statx.stx_rdev_major, statx.stx_rdev_minor),
        len: statx.stx_size,
        blocks: statx.stx_blocks,
        block_bytes: statx.stx_blksize,
        accessed: time(&statx.stx_atime),
        modified: time(&statx.stx_mtime),
        changed: time(&statx.stx_ctime),
        version: nanoseconds(&statx.stx_ctime),
    }
}

/// The bits of a mode with which a file runs as its owner, or as its group.
pub fn privileges_of(mode: u32) -> u32 {
    let is_for_group = mode & 0o2010 == 0o2010;
    mode & 0o4000 | if is_for_group { 0o2000 } else { 0 }
}

/// Whether a program with the file's content would have capabilities.
fn has_capabilities(file: BorrowedFd<'_>) -> bool {
    let found = rustix::fs::getxattr(by_descriptor(file), "security.capability", &mut [0_u8; 0]);
    !matches!(found, Err(Errno::NODATA | Errno::OPNOTSUPP))
}

/// Clears these bits of a regular file, and its capabilities, as the kernel does when the file is written.
///
/// # Errors
/// `EPERM` if this process is not root, and not the owner.
pub fn drop_privileges(file: BorrowedFd<'_>) -> io::Result<()> {
    let Attributes { kind, mode, .. } = attributes(file)?;
    if kind != FileKind::Regular || (privileges_of(mode) == 0 && !has_capabilities(file)) {
        return Ok(());
    }
    // A change of the owner, to the same one: the kernel clears what it has to of the mode that the file has at that moment. A mode that
    // was read before could be an older one than the owner has set.
    Ok(rustix::fs::chownat(file, "", None, None, AtFlags::EMPTY_PATH)?)
}

/// Sets attributes, except the length.
pub fn set_attributes(file: BorrowedFd<'_>, set: &SetAttributes) -> io::Result<()> {
    if set.uid.is_some() || set.gid.is_some() {
        let (uid, gid) = (set.uid.map(Uid::from_raw), set.gid.map(Gid::from_raw));
        if set.uid == Some(u32::MAX) || set.gid == Some(u32::MAX) {
            return Err(Errno::INVAL.into());
        }
        rustix::fs::chownat(file, "", uid, gid, AtFlags::EMPTY_PATH)?;
    }
    if let Some(mode) = set.mode {
        if attributes(file)?.kind == FileKind::SymbolicLink {
            return Err(Errno::OPNOTSUPP.into());
        }
        rustix::fs::chmodat(CWD, by_descriptor(file), mode_of(mode), AtFlags::empty())?;
    }
    if set.accessed.is_some() || set.modified.is_some() {
        let times =
            Timestamps { last_access: timespec(set.accessed)?, last_modification: timespec(set.modified)? };
        rustix::fs::utimensat(CWD, by_descriptor(file), &times, AtFlags::empty())?;
    }
    Ok(())
}

fn timespec(time: Option<SetTime>) -> io::Result<Timespec> {
    Ok(match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(SetTime::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(SetTime::At(time)) if time.nanoseconds >= 1_000_000_000 => return Err(Errno::INVAL.into()),
        Some(SetTime::At(time)) => Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() },
    })
}

fn mode_of(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & 0o7777)
}

/// Whether the thread's user may access a file so (`access(2)`).
pub fn check_access(file: BorrowedFd<'_>, mode: u8) -> io::Result<()> {
    let access = Access::from_bits(mode.into()).ok_or(Errno::INVAL)?;
    Ok(rustix::fs::accessat(CWD, by_descriptor(file), access, AtFlags::EACCESS)?)
}

/// The flags of `open(2)` for what a client wants.
fn open_flags(access: OpenAccess) -> OFlags {
    let mode = match (access.contains(OpenAccess::READ), access.changes()) {
        (true, true) => OFlags::RDWR,
        (false, true) => OFlags::WRONLY,
        _ => OFlags::RDONLY,
    };
    // Not blocking: a FIFO would wait for its other end.
    mode | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY
}

/// Opens a regular file as the thread's user.
pub fn open(file: BorrowedFd<'_>, access: OpenAccess) -> io::Result<OwnedFd> {
    match attributes(file)?.kind {
        FileKind::Regular => {}
        FileKind::Directory => return Err(Errno::ISDIR.into()),
        FileKind::SymbolicLink => return Err(Errno::LOOP.into()),
        _ => return Err(Errno::OPNOTSUPP.into()),
    }
    Ok(rustix::fs::open(by_descriptor(file), open_flags(access), Mode::empty())?)
}

/// The first `len` bytes of a file, fewer if it ends before.
pub fn read_start(file: BorrowedFd<'_>, len: usize) -> io::Result<Vec<u8>> {
    let (mut bytes, mut filled) = (vec![0; len], 0);
    while filled < len {
        match rustix::io::pread(file, &mut bytes[filled..], filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

/// Opens a file for reading and writing that a client has opened for writing: a region needs both. Rights are the
/// server's; those of the client's key stay what the client has opened the file for.
pub fn reopen(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(by_descriptor(file), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

/// Makes a regular file, and opens it.
///
/// # Errors
/// `EEXIST` if the name is taken; the system's.
pub fn create(parent: BorrowedFd<'_>, name: &[u8], mode: u32, access: OpenAccess) -> io::Result<OwnedFd> {
    let flags = open_flags(access) | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
    Ok(rustix::fs::openat2(parent, name, flags, mode_of(mode), NAME)?)
}

/// Makes a directory.
pub fn make_directory(parent: BorrowedFd<'_>, name: &[u8], mode: u32) -> io::Result<()> {
    Ok(rustix::fs::mkdirat(parent, name, mode_of(mode))?)
}

/// Makes a FIFO.
pub fn make_fifo(parent: BorrowedFd<'_>, name: &[u8], mode: u32) -> io::Result<()> {
    Ok(rustix::fs::mknodat(parent, name, FileType::Fifo, mode_of(mode), 0)?)
}

/// Makes a symbolic link.
pub fn symlink(parent: BorrowedFd<'_>, name: &[u8], target: &Text) -> io::Result<()> {
    Ok(rustix::fs::symlinkat(&*target.0, parent, name)?)
}

/// Makes a further name of a file.
pub fn link(file: BorrowedFd<'_>, parent: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    Ok(rustix::fs::linkat(CWD, by_descriptor(file), parent, name, AtFlags::SYMLINK_FOLLOW)?)
}

/// Removes a name; with `is_directory` that of an empty directory.
pub fn unlink(parent: BorrowedFd<'_>, name: &[u8], is_directory: bool) -> io::Result<()> {
    let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    Ok(rustix::fs::unlinkat(parent, name, flags)?)
}

/// Renames a file.
pub fn rename(
    parent: BorrowedFd<'_>,
    name: &[u8],
    new_parent: BorrowedFd<'_>,
    new_name: &[u8],
    mode: RenameMode,
) -> io::Result<()> {
    let flags = match mode {
        RenameMode::Replace => RenameFlags::empty(),
        RenameMode::NoReplace => RenameFlags::NOREPLACE,
        RenameMode::Exchange => RenameFlags::EXCHANGE,
    };
    Ok(rustix::fs::renameat_with(parent, name, new_parent, new_name, flags)?)
}

/// The target of a symbolic link.
pub fn read_link(file: BorrowedFd<'_>) -> io::Result<Text> {
    let target = rustix::fs::readlinkat(file, "", Vec::new());
    // Other files have no target, which the kernel reports as ENOENT where there is no name.
    let target = target.map_err(|errno| if errno == Errno::NOENT { Errno::INVAL } else { errno })?;
    Ok(Text(target.into_bytes()))
}

/// Opens a file or directory to make it persistent: it may be open for reading only, or for writing only.
pub fn open_to_sync(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let path = by_descriptor(file);
    Ok(rustix::fs::open(&path, flags | OFlags::RDONLY, Mode::empty())
        .or_else(|_| rustix::fs::open(&path, flags | OFlags::WRONLY, Mode::empty()))?)
}

/// The file system.
pub fn file_system(file: BorrowedFd<'_>) -> io::Result<FileSystem> {
    let found = rustix::fs::fstatvfs(file)?;
    Ok(FileSystem {
        block_bytes: found.f_frsize,
        blocks: found.f_blocks,
        blocks_free: found.f_bfree,
        blocks_available: found.f_bavail,
        files: found.f_files,
        files_free: found.f_ffree,
        name_bytes_max: found.f_namemax,
    })
}

/// Names of a directory from a cookie on, as many as fit into a message. With `lookup_all` each comes with its attributes,
/// and the descriptor by which they were read.
pub fn read_directory(
    directory: BorrowedFd<'_>,
    cookie: u64,
    with_attributes: bool,
) -> io::Result<(DirectoryPage, Vec<(FileId, OwnedFd)>)> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(by_descriptor(directory), flags, Mode::empty())?;
    rustix::fs::seek(&opened, SeekFrom::Start(cookie))?;
    let mut buffer = [MaybeUninit::uninit(); NAMES_BYTES];
    let mut names = RawDir::new(&opened, &mut buffer);
    let (mut page, mut found) = (DirectoryPage::default(), Vec::new());
    // The reader of the page goes on behind its last entry.
    let (mut last, mut room) = (cookie, MESSAGE_BYTES_MAX - HEADER_BYTES - ENTRY_BYTES_MAX);
    while let Some(entry) = names.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        let needed = name.len() + ENTRY_BYTES_MAX;
        if needed > room {
            page.next = Some(last);
            return Ok((page, found));
        }
        last = entry.next_entry_cookie();
        if name == b"." || name == b".." {
            continue;
        }
        room -= needed;
        let file = if with_attributes { lookup(directory, name).ok() } else { None };
        let attributes = file.as_ref().and_then(|file| attributes(file.as_fd()).ok());
        page.entries.push(DirectoryEntry {
            name: Text::from(name),
            cookie: last,
            ino: entry.ino(),
            kind: kind_of(entry.file_type()),
            attributes,
        });
        if let (Some(file), Some(attributes)) = (file, attributes) {
            found.push((attributes.id, file));
        }
    }
    Ok((page, found))
}

fn kind_of(file_type: FileType) -> Option<FileKind> {
    Some(match file_type {
        FileType::RegularFile => FileKind::Regular,
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::SymbolicLink,
        FileType::Fifo => FileKind::Fifo,
        FileType::Socket => FileKind::Socket,
        FileType::CharacterDevice => FileKind::CharacterDevice,
        FileType::BlockDevice => FileKind::BlockDevice,
        FileType::Unknown => return None,
    })
}
