//! The functions of `terrace_export.h`: a client of exported directories.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::net::ToSocketAddrs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use terrace_export::{
    Attributes, Client, ClientConfig, ExportError, FileId, FileKind, LockKind, OpenAccess, RemoteFile,
    RenameMode, SetAttributes, Timestamp,
};

use crate::errno::{EINVAL, Errno, Result, minus_one, pointer};

/// The port of exports.
const PORT: u16 = 7447;
/// `TERRACE_FILE_COMMIT`.
const TERRACE_FILE_COMMIT: c_uint = 1;
/// Flags of `open(2)` that have an effect, and one that has none.
const OPEN_FLAGS: c_int =
    libc::O_ACCMODE | libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC | libc::O_APPEND | libc::O_CLOEXEC;
/// Bits of a mode that are rights.
const MODE_BITS: u32 = 0o7777;

/// `struct terrace_export`.
pub struct Connection {
    client: Client,
    timeout: Duration,
}

/// `struct terrace_file`.
pub struct OpenFile {
    file: RemoteFile,
}

/// `terrace_entry`.
type Entry = unsafe extern "C" fn(*mut c_void, *const c_char, *const libc::stat) -> c_int;

impl From<ExportError> for Errno {
    fn from(error: ExportError) -> Errno {
        tracing::debug!("{error}");
        Errno(error.errno())
    }
}

/// # Safety
/// `object` is null, or valid for `'a`.
unsafe fn object<'a, T>(object: *const T) -> Result<&'a T> {
    // SAFETY: the caller's.
    unsafe { object.as_ref() }.ok_or(EINVAL)
}

/// A path relative to the exported directory.
///
/// # Safety
/// `text` is null or a string that is valid for `'a`.
unsafe fn path<'a>(text: *const c_char) -> Result<&'a Path> {
    if text.is_null() {
        return Err(EINVAL);
    }
    // SAFETY: not null, and the caller's.
    let text = unsafe { CStr::from_ptr(text) };
    let path = Path::new(OsStr::from_bytes(text.to_bytes()));
    Ok(path.strip_prefix("/").unwrap_or(path))
}

impl Connection {
    fn find(&self, path: &Path) -> Result<FileId> {
        if path.as_os_str().is_empty() {
            return Ok(self.client.root());
        }
        Ok(self.client.lookup_path(path)?.id)
    }

    /// The directory and the last name of a path.
    fn split<'a>(&self, path: &'a Path) -> Result<(FileId, &'a OsStr)> {
        let name = path.file_name().ok_or(EINVAL)?;
        Ok((self.find(path.parent().unwrap_or(Path::new("")))?, name))
    }

    fn open(&self, path: &Path, flags: c_int, mode: u32) -> Result<RemoteFile> {
        let changes = if flags & libc::O_APPEND == 0 { OpenAccess::WRITE } else { OpenAccess::APPEND };
        let access = match flags & libc::O_ACCMODE {
            libc::O_RDONLY => OpenAccess::READ,
            libc::O_WRONLY => changes,
            libc::O_RDWR => OpenAccess::READ | changes,
            _ => return Err(EINVAL),
        };
        let empties = flags & libc::O_TRUNC != 0;
        if flags & !OPEN_FLAGS != 0 || (empties && !access.contains(OpenAccess::WRITE)) {
            return Err(EINVAL);
        }
        if flags & libc::O_CREAT == 0 {
            let access = if empties { access | OpenAccess::TRUNCATE } else { access };
            return Ok(self.client.open(self.find(path)?, access)?);
        }
        let (parent, name) = self.split(path)?;
        let file = self.client.create(parent, name, mode & MODE_BITS, access, flags & libc::O_EXCL != 0)?;
        if empties {
            file.truncate(0)?;
        }
        Ok(file)
    }

    /// Calls `entry` for each name of a directory, until it returns another value than 0. A wrong server's listing may not
    /// end: that this waits for the server all in all is limited.
    fn list(&self, path: &Path, entry: impl Fn(&CStr, &libc::stat) -> c_int) -> Result<c_int> {
        let (directory, mut cookie) = (self.find(path)?, Some(0));
        let mut waited = Duration::ZERO;
        while let Some(at) = cookie {
            if waited > self.timeout {
                return Err(Errno(libc::ETIMEDOUT));
            }
            let asked_at = Instant::now();
            let page = self.client.read_directory(directory, at, true)?;
            waited += asked_at.elapsed();
            cookie = page.next;
            for found in page.entries {
                let (Ok(name), Some(attributes)) = (CString::new(found.name.0), found.attributes) else {
                    continue;
                };
                match entry(&name, &stat_of(&attributes)) {
                    0 => {}
                    value => return Ok(value),
                }
            }
        }
        Ok(0)
    }
}

/// Connects to the first address of `HOST` or `HOST:PORT` at which an export answers.
fn connect(server: &str, timeout: Option<Duration>) -> Result<Connection> {
    let found = server.to_socket_addrs().or_else(|_| (server, PORT).to_socket_addrs());
    let mut refused = Errno(libc::EHOSTUNREACH);
    for address in found.into_iter().flatten() {
        let defaults = ClientConfig::new(address);
        let timeout = timeout.unwrap_or(defaults.timeout);
        match Client::connect(&ClientConfig { timeout, ..defaults }) {
            Ok(client) => return Ok(Connection { client, timeout }),
            Err(error) => refused = error.into(),
        }
    }
    Err(refused)
}

fn stat_of(attributes: &Attributes) -> libc::stat {
    // SAFETY: a structure of integers, for which zeros are valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    let kind = match attributes.kind {
        FileKind::Regular => libc::S_IFREG,
        FileKind::Directory => libc::S_IFDIR,
        FileKind::SymbolicLink => libc::S_IFLNK,
        FileKind::Fifo => libc::S_IFIFO,
        FileKind::Socket => libc::S_IFSOCK,
        FileKind::CharacterDevice => libc::S_IFCHR,
        FileKind::BlockDevice => libc::S_IFBLK,
    };
    stat.st_dev = attributes.id.dev;
    stat.st_ino = attributes.id.ino;
    stat.st_mode = kind | (attributes.mode & MODE_BITS);
    stat.st_nlink = attributes.links;
    (stat.st_uid, stat.st_gid, stat.st_rdev) = (attributes.uid, attributes.gid, attributes.rdev);
    // A hostile server's numbers stay numbers.
    stat.st_size = attributes.len as i64;
    stat.st_blocks = attributes.blocks as i64;
    stat.st_blksize = attributes.block_bytes.into();
    let parts = |time: Timestamp| (time.seconds, i64::from(time.nanoseconds));
    (stat.st_atime, stat.st_atime_nsec) = parts(attributes.accessed);
    (stat.st_mtime, stat.st_mtime_nsec) = parts(attributes.modified);
    (stat.st_ctime, stat.st_ctime_nsec) = parts(attributes.changed);
    stat
}

/// # Safety
/// `into` is null or valid for writing.
unsafe fn store(attributes: &Attributes, into: *mut libc::stat) -> Result<()> {
    if into.is_null() {
        return Err(EINVAL);
    }
    // SAFETY: not null, and the caller's.
    unsafe { into.write(stat_of(attributes)) };
    Ok(())
}

/// The program's bytes.
///
/// # Safety
/// `buffer` is null or valid for `length` bytes for `'a`.
unsafe fn bytes<'a>(buffer: *const c_void, length: usize) -> Result<&'a [u8]> {
    if length == 0 {
        return Ok(&[]);
    }
    if buffer.is_null() || length > isize::MAX as usize {
        return Err(EINVAL);
    }
    // SAFETY: not null, not too long, and the caller's.
    Ok(unsafe { std::slice::from_raw_parts(buffer.cast(), length) })
}

fn number(result: Result<i64>) -> i64 {
    result.unwrap_or_else(|errno| {
        errno.set();
        -1
    })
}

/// `terrace_export_connect`.
///
/// # Safety
/// `server` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_export_connect(
    server: *const c_char,
    timeout_ms: c_uint,
) -> *mut Connection {
    let connected = || {
        if server.is_null() {
            return Err(EINVAL);
        }
        // SAFETY: not null, and the caller's.
        let server = unsafe { CStr::from_ptr(server) }.to_str().map_err(|_| EINVAL)?;
        let timeout = (timeout_ms != 0).then(|| Duration::from_millis(timeout_ms.into()));
        Ok(Box::into_raw(Box::new(connect(server, timeout)?)))
    };
    pointer(connected())
}

/// `terrace_export_disconnect`.
///
/// # Safety
/// `connection` is null, or a connection that nobody uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_export_disconnect(connection: *mut Connection) {
    if !connection.is_null() {
        // SAFETY: of `terrace_export_connect`, and the caller's.
        drop(unsafe { Box::from_raw(connection) });
    }
}

/// `terrace_export_open`.
///
/// # Safety
/// `connection` is null or a connection, `name` null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_export_open(
    connection: *mut Connection,
    name: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
) -> *mut OpenFile {
    // SAFETY: the caller's.
    let arguments = || unsafe { Ok((object(connection)?, path(name)?)) };
    pointer(arguments().and_then(|(connection, path)| {
        let file = connection.open(path, flags, mode)?;
        Ok(Box::into_raw(Box::new(OpenFile { file })))
    }))
}

/// `terrace_export_stat`.
///
/// # Safety
/// The pointers are null, or valid: a connection, a string, memory for the attributes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_export_stat(
    connection: *mut Connection,
    name: *const c_char,
    into: *mut libc::stat,
) -> c_int {
    // SAFETY: the caller's.
    minus_one(unsafe {
        object(connection).and_then(|connection| {
            let id = connection.find(path(name)?)?;
            store(&connection.client.attributes(id)?, into)
        })
    })
}

/// A function of a connection and a path.
macro_rules! path_call {
    ($(#[$about:meta])* $name:ident($($argument:ident: $type:ty),*), $call:expr) => {
        $(#[$about])*
        ///
        /// # Safety
        /// `connection` is null or a connection, `name` null or a string.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            connection: *mut Connection,
            name: *const c_char,
            $($argument: $type),*
        ) -> c_int {
            let call: fn(&Connection, &Path, $($type),*) -> Result<()> = $call;
            // SAFETY: the caller's.
            let arguments = unsafe { object(connection).and_then(|connection| Ok((connection, path(name)?))) };
            minus_one(arguments.and_then(|(connection, path)| call(connection, path, $($argument),*)))
        }
    };
}

path_call! {
    /// `terrace_export_chmod`.
    terrace_export_chmod(mode: libc::mode_t), |connection, path, mode| {
        let set = SetAttributes { mode: Some(mode & MODE_BITS), ..SetAttributes::default() };
        connection.client.set_attributes(connection.find(path)?, &set)?;
        Ok(())
    }
}

path_call! {
    /// `terrace_export_mkdir`.
    terrace_export_mkdir(mode: libc::mode_t), |connection, path, mode| {
        let (parent, name) = connection.split(path)?;
        connection.client.make_directory(parent, name, mode & MODE_BITS)?;
        Ok(())
    }
}

path_call! {
    /// `terrace_export_rmdir`.
    terrace_export_rmdir(), |connection, path| {
        let (parent, name) = connection.split(path)?;
        Ok(connection.client.remove_directory(parent, name)?)
    }
}

path_call! {
    /// `terrace_export_unlink`.
    terrace_export_unlink(), |connection, path| {
        let (parent, name) = connection.split(path)?;
        Ok(connection.client.unlink(parent, name)?)
    }
}

path_call! {
    /// `terrace_export_sync`.
    terrace_export_sync(), |connection, path| Ok(connection.client.sync(connection.find(path)?)?)
}

/// `terrace_export_rename`.
///
/// # Safety
/// `connection` is null or a connection, the names null or strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_export_rename(
    connection: *mut Connection,
    name: *const c_char,
    new_name: *const c_char,
) -> c_int {
    // SAFETY: the caller's.
    let arguments = || unsafe { Ok((object(connection)?, path(name)?, path(new_name)?)) };
    minus_one(arguments().and_then(|(connection, from, to)| {
        let ((parent, name), (new_parent, new_name)) = (connection.split(from)?, connection.split(to)?);
        Ok(connection.client.rename(parent, name, new_parent, new_name, RenameMode::Replace)?)
    }))
}

/// `terrace_export_symlink`.
///
/// # Safety
/// `connection` is null or a connection, the others null or strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_export_symlink(
    connection: *mut Connection,
    target: *const c_char,
    name: *const c_char,
) -> c_int {
    let arguments = || {
        if target.is_null() {
            return Err(EINVAL);
        }
        // SAFETY: not null, and the caller's.
        unsafe { Ok((object(connection)?, CStr::from_ptr(target), path(name)?)) }
    };
    minus_one(arguments().and_then(|(connection, target, path)| {
        let (parent, name) = connection.split(path)?;
        connection.client.symlink(parent, name, OsStr::from_bytes(target.to_bytes()))?;
        Ok(())
    }))
}

/// `terrace_export_readdir`.
///
/// # Safety
/// `connection` is null or a connection, `name` null or a string; `entry` may be called with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_export_readdir(
    connection: *mut Connection,
    name: *const c_char,
    entry: Option<Entry>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's.
    let arguments = || unsafe { Ok((object(connection)?, path(name)?, entry.ok_or(EINVAL)?)) };
    let listed = arguments().and_then(|(connection, path, entry)| {
        // SAFETY: the caller's; name and attributes are valid during the call.
        connection.list(path, |name, stat| unsafe { entry(context, name.as_ptr(), stat) })
    });
    listed.unwrap_or_else(|errno| minus_one(Err(errno)))
}

/// `terrace_file_pread`.
///
/// # Safety
/// `file` is null or an open file, `buffer` null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_file_pread(
    file: *mut OpenFile,
    buffer: *mut c_void,
    length: usize,
    offset: u64,
) -> isize {
    let read = || {
        // SAFETY: the caller's.
        let file = unsafe { object(file)? };
        if length == 0 {
            return Ok(0);
        }
        if buffer.is_null() || length > isize::MAX as usize {
            return Err(EINVAL);
        }
        // SAFETY: not null, not too long, and the caller's. Bytes of any value are valid, and are only overwritten.
        let into = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), length) };
        Ok(file.file.read_at(offset, into)? as i64)
    };
    number(read()) as isize
}

/// `terrace_file_pwrite`.
///
/// # Safety
/// `file` is null or an open file, `buffer` null or valid for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_file_pwrite(
    file: *mut OpenFile,
    buffer: *const c_void,
    length: usize,
    offset: u64,
) -> isize {
    // SAFETY: the caller's.
    let arguments = || unsafe { Ok((object(file)?, bytes(buffer, length)?)) };
    number(arguments().and_then(|(file, data)| {
        file.file.write_at(offset, data)?;
        Ok(data.len() as i64)
    })) as isize
}

/// `terrace_file_append`.
///
/// # Safety
/// `file` is null or an open file, `record` null or valid for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_file_append(
    file: *mut OpenFile,
    record: *const c_void,
    length: usize,
    flags: c_uint,
) -> i64 {
    // SAFETY: the caller's.
    let arguments = || unsafe { Ok((object(file)?, bytes(record, length)?)) };
    number(arguments().and_then(|(file, record)| match flags {
        0 => Ok(file.file.append(record)? as i64),
        TERRACE_FILE_COMMIT => Ok(file.file.append_commit(record)? as i64),
        _ => Err(EINVAL),
    }))
}

/// `terrace_file_commit`.
///
/// # Safety
/// `file` is null or an open file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_file_commit(file: *mut OpenFile) -> c_int {
    // SAFETY: the caller's.
    minus_one(unsafe { object(file) }.and_then(|file| Ok(file.file.commit()?)))
}

/// `terrace_file_stat`.
///
/// # Safety
/// `file` is null or an open file, `into` null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_file_stat(file: *mut OpenFile, into: *mut libc::stat) -> c_int {
    // SAFETY: the caller's.
    minus_one(unsafe { object(file).and_then(|file| store(&file.file.attributes()?, into)) })
}

/// `terrace_file_truncate`.
///
/// # Safety
/// `file` is null or an open file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_file_truncate(file: *mut OpenFile, length: u64) -> c_int {
    // SAFETY: the caller's.
    minus_one(unsafe { object(file) }.and_then(|file| Ok(file.file.truncate(length)?)))
}

/// `terrace_file_punch`.
///
/// # Safety
/// `file` is null or an open file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_file_punch(file: *mut OpenFile, offset: u64, length: u64) -> c_int {
    // SAFETY: the caller's.
    minus_one(unsafe { object(file) }.and_then(|file| Ok(file.file.punch(offset, length)?)))
}

/// `terrace_file_flock`.
///
/// # Safety
/// `file` is null or an open file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_file_flock(
    file: *mut OpenFile,
    owner: u64,
    operation: c_int,
    timeout_ms: c_uint,
) -> c_int {
    // SAFETY: the caller's.
    minus_one(unsafe { object(file) }.and_then(|file| {
        let kind = match operation {
            libc::LOCK_SH => LockKind::Shared,
            libc::LOCK_EX => LockKind::Exclusive,
            libc::LOCK_UN => LockKind::Unlock,
            _ => return Err(EINVAL),
        };
        Ok(file.file.lock(owner, kind, Duration::from_millis(timeout_ms.into()))?)
    }))
}

/// `terrace_file_close`.
///
/// # Safety
/// `file` is null, or an open file that nobody uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_file_close(file: *mut OpenFile) -> c_int {
    if file.is_null() {
        return minus_one(Err(EINVAL));
    }
    // SAFETY: of `terrace_export_open`, and the caller's.
    let file = unsafe { Box::from_raw(file) };
    minus_one(file.file.close().map_err(Errno::from))
}
