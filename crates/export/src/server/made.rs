//! The files that exclusive requests have made, so that a client whose answer was lost has the file that it made.
//!
//! A request names itself by a number of the client's choice ([`Request::Create`](crate::proto::Request::Create)). Its entry says that it
//! has begun, before the file is made, and which file it is, afterwards. The entries are in a file in memory, which outlives the
//! process: a server that was killed knows them when it is started again. A host that restarts forgets them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, OFlags};
use terrace_sync::Mutex;

use crate::proto::{Attributes, FileId};

/// Requests that are remembered. A client repeats a request within the time of a call.
const ENTRIES: usize = 4096;
const ENTRY_BYTES: usize = 64;
const DIRECTORY: &str = "/dev/shm";
const OPEN_TRIES: usize = 3;
const PREFIX: &str = "terrace-export-";
/// A server removes the files of others that have not served any client for so long.
const UNUSED_MAX: Duration = Duration::from_secs(600);

/// A request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry {
    /// Counted from 1 on. Its place is the remainder by [`ENTRIES`].
    number: u64,
    client: u64,
    request: u64,
    /// When it began, by the clock of the file system: nanoseconds since 1970.
    began: u64,
    /// The file, once it is made.
    file: Option<FileId>,
}

/// The requests of a server.
pub struct MadeFiles {
    table: Mutex<Table>,
}

struct Table {
    /// `None` where no such file can be had: then a server that was killed has forgotten them.
    file: Option<File>,
    entries: Vec<Option<Entry>>,
    /// The number of the last one.
    last: u64,
}

/// A request that is carried out.
pub struct Begun(Entry);

impl MadeFiles {
    /// Those of the server of a directory at a port. Of two such servers at a time, the second one remembers them by itself.
    pub fn of(root: FileId, port: u16) -> MadeFiles {
        let uid = rustix::process::geteuid().as_raw();
        let (directory, name) =
            (Path::new(DIRECTORY), format!("{PREFIX}{uid}-{:x}-{:x}-{port}", root.dev, root.ino));
        remove_unused(directory, &name);
        MadeFiles::at(&directory.join(name))
    }

    fn at(path: &Path) -> MadeFiles {
        let file = open(path).inspect_err(|error| {
            tracing::info!(
                %error,
                path = %path.display(),
                "files that clients make while the server is killed may be reported as there already"
            );
        });
        let file = file.ok();
        let entries: Vec<_> =
            (0..ENTRIES).map(|index| file.as_ref().and_then(|file| read(file, index))).collect();
        let last = entries.iter().flatten().map(|entry| entry.number).max().unwrap_or(0);
        MadeFiles { table: Mutex::new(Table { file, entries, last }) }
    }

    /// Leaves the file to another server.
    pub fn close(&self) {
        self.table.lock().file = None;
    }

    /// Notes that a request of a client begins.
    pub fn begin(&self, client: u64, request: u64) -> Begun {
        let mut table = self.table.lock();
        table.last = table.last.wrapping_add(1).max(1);
        let entry = Entry { number: table.last, client, request, began: now(), file: None };
        table.set(entry.number, Some(entry));
        Begun(entry)
    }

    /// Notes the file that it has made.
    pub fn end(&self, Begun(entry): Begun, file: FileId) {
        self.table.lock().set(entry.number, Some(Entry { file: Some(file), ..entry }));
    }

    /// Notes that it has made none.
    pub fn forget(&self, Begun(entry): Begun) {
        self.table.lock().set(entry.number, None);
    }

    /// Whether an earlier one of these requests, which a user has made, has made a file. Of one that was under way when the server was
    /// killed, it is an empty file of that user that has come since then, and that no other request has made: it is this request's then.
    pub fn claim(&self, client: u64, request: u64, uid: u32, file: &Attributes) -> bool {
        let mut table = self.table.lock();
        let entries = || table.entries.iter().flatten();
        let is_own = |entry: &&Entry| (entry.client, entry.request) == (client, request);
        if let Some(claimed) = entries().find(|entry| entry.file == Some(file.id)) {
            return is_own(&claimed);
        }
        let is_new = |entry: &&Entry| file.id.generation >= entry.began && (file.len, file.links) == (0, 1);
        let begun =
            entries().filter(is_own).find(|entry| entry.file.is_none() && is_new(entry) && file.uid == uid);
        let Some(begun) = begun.copied() else { return false };
        table.set(begun.number, Some(Entry { file: Some(file.id), ..begun }));
        true
    }
}

impl Table {
    fn set(&mut self, number: u64, entry: Option<Entry>) {
        let index = (number % ENTRIES as u64) as usize;
        self.entries[index] = entry;
        // Without memory the entry of an earlier request stays, which has another number.
        let _ = self.file.as_ref().map(|file| write(file, index, &entry.unwrap_or_default()));
    }
}

/// Removes files of servers that have ended, but for one. One that cannot be removed stays.
fn remove_unused(directory: &Path, kept: &str) {
    let Ok(entries) = directory.read_dir() else { return };
    for entry in entries.flatten().filter(|entry| entry.file_name() != kept) {
        let is_unused = |modified: SystemTime| modified.elapsed().is_ok_and(|age| age > UNUSED_MAX);
        let is_old = || entry.metadata().and_then(|metadata| metadata.modified()).is_ok_and(is_unused);
        if entry.file_name().to_string_lossy().starts_with(PREFIX) && is_old() && open(&entry.path()).is_ok()
        {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// The file, if no other process has it.
fn open(path: &Path) -> io::Result<File> {
    // Another server may remove it just before it is locked.
    for _ in 0..OPEN_TRIES {
        let file = open_once(path)?;
        if file.metadata()?.nlink() > 0 {
            return Ok(file);
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

fn open_once(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(OFlags::NOFOLLOW.bits() as i32)
        .open(path)?;
    // Anybody can make files there.
    if file.metadata()?.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    file.set_len((ENTRIES * ENTRY_BYTES) as u64)?;
    Ok(file)
}

fn now() -> u64 {
    // File systems take the time of the last tick.
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + now.tv_nsec as u64
}

fn write(file: &File, index: usize, entry: &Entry) -> io::Result<()> {
    let made = entry.file.unwrap_or_default();
    let words = [entry.number, entry.client, entry.request, entry.began, made.dev, made.ino, made.generation];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend_from_slice(&u64::from(crc32fast::hash(&bytes)).to_le_bytes());
    file.write_all_at(&bytes, (index * ENTRY_BYTES) as u64)
}

/// An entry; `None` if there is none, or it was not written as a whole.
fn read(file: &File, index: usize) -> Option<Entry> {
    let mut bytes = [0; ENTRY_BYTES];
    file.read_exact_at(&mut bytes, (index * ENTRY_BYTES) as u64).ok()?;
    let word = |at: usize| bytes[8 * at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    let is_whole = word(0) != 0 && word(7) == u64::from(crc32fast::hash(&bytes[..ENTRY_BYTES - 8]));
    let made = FileId { dev: word(4), ino: word(5), generation: word(6) };
    let file = Some(made).filter(|made| *made != FileId::default());
    is_whole.then(|| Entry { number: word(0), client: word(1), request: word(2), began: word(3), file })
}

#[cfg(test)]
mod tests {
    use rustix::fs::CWD;

    use super::*;
    use crate::server::tree;

    fn file(ino: u64, generation: u64) -> Attributes {
        let id = FileId { dev: 1, ino, generation };
        Attributes { id, links: 1, uid: 5, len: 0, ..tree::attributes(CWD).unwrap() }
    }

    #[test]
    fn requests_are_remembered_by_the_next_server_and_only_their_files_are_theirs() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("made");
        let first = MadeFiles::at(&path);
        let made = file(3, now());
        first.end(first.begin(1, 10), made.id);
        // The server is killed while it carries these out.
        let (_lost, failed) = (first.begin(1, 11), first.begin(1, 12));
        first.forget(failed);
        let second = MadeFiles::at(&path);
        assert!(!second.claim(1, 10, 5, &made), "two servers at a time");
        drop((first, second));
        let next = MadeFiles::at(&path);
        assert!(next.claim(1, 10, 5, &made));
        assert!(!next.claim(2, 10, 5, &made) && !next.claim(1, 9, 5, &made));
        assert!(!next.claim(1, 10, 5, &file(4, now())));
        let new = file(4, u64::MAX);
        assert!(!next.claim(1, 12, 5, &new), "it was answered");
        assert!(!next.claim(1, 11, 6, &new), "another user's");
        assert!(!next.claim(1, 11, 5, &file(4, 1)), "it was there before");
        assert!(!next.claim(1, 11, 5, &Attributes { len: 1, ..new }));
        let _also_lost = next.begin(1, 13);
        assert!(next.claim(1, 11, 5, &new), "it has come since");
        assert!(next.claim(1, 11, 5, &new) && !next.claim(1, 13, 5, &new), "it is claimed");
        let others = file(5, u64::MAX);
        next.end(next.begin(2, 1), others.id);
        assert!(!next.claim(1, 13, 5, &others), "another request's");
    }

    #[test]
    fn a_damaged_file_has_no_requests() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("made");
        let made = file(3, now());
        let first = MadeFiles::at(&path);
        first.end(first.begin(1, 10), made.id);
        drop(first);
        OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .write_all_at(&[9], ENTRY_BYTES as u64 + 20)
            .unwrap();
        assert!(!MadeFiles::at(&path).claim(1, 10, 5, &made));
        std::fs::write(&path, "short").unwrap();
        assert!(!MadeFiles::at(&path).claim(1, 10, 5, &made));
    }

    #[test]
    fn files_of_servers_that_have_ended_are_removed_after_a_while() {
        let directory = tempfile::tempdir().unwrap();
        let old = || SystemTime::now() - 2 * UNUSED_MAX;
        let make = |name: &str| {
            let path = directory.path().join(name);
            File::create(&path).unwrap().set_modified(old()).unwrap();
            path
        };
        let (ended, kept, others) = (make("terrace-export-1"), make("terrace-export-2"), make("others"));
        let used = make("terrace-export-3");
        let _server = MadeFiles::at(&used);
        File::open(&used).unwrap().set_modified(old()).unwrap();
        remove_unused(directory.path(), "terrace-export-2");
        assert!(!ended.exists() && kept.exists() && others.exists() && used.exists());
    }
}
