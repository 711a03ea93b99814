//! Open directories.
//!
//! The server sends more names at once than the kernel takes. The rest is kept for the kernel's next requests, for as long as the
//! kernel may believe names and attributes (`--cache`), and until a program here makes or removes a name in the directory. An
//! attribute of a file that a program here has changed since is asked for anew.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Instant;

use fuser::{Errno, FileType, Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus};
use terrace_export::{DirectoryEntry, DirectoryPage};
use terrace_sync::Mutex;

use crate::attributes::{errno, file_type};
use crate::inodes::Inode;
use crate::mount::Mount;
use crate::remote::Remote;

/// An open directory.
pub(crate) struct OpenDirectory<R: Remote> {
    inode: Arc<Inode<R>>,
    listing: Mutex<Listing>,
}

/// What is known of an open directory's names.
struct Listing {
    /// Where the server goes on behind each entry: offset n of the kernel is `cookies[n - DOTS]`. The server's cookies may be any
    /// numbers.
    cookies: Vec<u64>,
    /// The last page.
    page: Option<Arc<KeptPage>>,
}

/// A page of names.
struct KeptPage {
    /// The kernel's offset of its first entry.
    offset: u64,
    page: DirectoryPage,
    /// When the server was asked for it.
    since: Instant,
}

/// The entries before the names: `.` and `..`.
const DOTS: u64 = 2;

impl KeptPage {
    /// Its entries from an offset on: none at the end of the directory. `None` if they are on another page.
    fn entries_from(&self, offset: u64) -> Option<&[DirectoryEntry]> {
        let at = usize::try_from(offset.checked_sub(self.offset)?).ok()?;
        let entries = self.page.entries.get(at..)?;
        (!entries.is_empty() || self.page.next.is_none()).then_some(entries)
    }
}

impl Listing {
    fn new() -> Listing {
        Listing { cookies: vec![0], page: None }
    }

    /// The server's cookie for an offset of the kernel.
    fn cookie_at(&self, offset: u64) -> Option<u64> {
        self.cookies.get(usize::try_from(offset.checked_sub(DOTS)?).ok()?).copied()
    }

    /// Keeps a page, and remembers where the server goes on behind each of its entries.
    fn keep(&mut self, page: &Arc<KeptPage>) {
        self.cookies.truncate((page.offset - DOTS + 1) as usize);
        self.cookies.extend(page.page.entries.iter().map(|entry| entry.cookie));
        self.page = Some(page.clone());
    }
}

impl<R: Remote> Mount<R> {
    /// Opens a directory.
    pub(crate) fn open_directory(&self, ino: u64) -> Result<u64, Errno> {
        let directory = OpenDirectory { inode: self.inode(ino)?, listing: Mutex::new(Listing::new()) };
        Ok(self.directories.add(Arc::new(directory)))
    }

    /// A page with the entries from an offset on: the last one, or a new one. `None` if the kernel has not got that offset.
    fn page_at(&self, directory: &OpenDirectory<R>, offset: u64) -> Result<Option<Arc<KeptPage>>, Errno> {
        let (cookie, kept) = {
            let listing = directory.listing.lock();
            (listing.cookie_at(offset), listing.page.clone())
        };
        let is_current = |kept: &Arc<KeptPage>| {
            kept.since.elapsed() < self.ttl && !directory.inode.has_changed_since(kept.since)
        };
        if let Some(kept) = kept.filter(|kept| kept.entries_from(offset).is_some() && is_current(kept)) {
            return Ok(Some(kept));
        }
        let Some(cookie) = cookie else { return Ok(None) };
        let since = Instant::now();
        let page =
            self.remote.read_directory(directory.inode.id, cookie, true).map_err(|error| errno(&error))?;
        let page = Arc::new(KeptPage { offset, page, since });
        directory.listing.lock().keep(&page);
        Ok(Some(page))
    }

    /// Adds entries from an offset on, until `add` says that there is no room: `add(directory, name, offset of the next, entry)`,
    /// where the entry comes with the time at which the server was asked for it, and is `None` for `.` and `..`.
    fn add_entries(
        &self,
        handle: u64,
        offset: u64,
        mut add: impl FnMut(&OpenDirectory<R>, &OsStr, u64, Option<(&DirectoryEntry, Instant)>) -> bool,
    ) -> Result<(), Errno> {
        let directory = self.directories.get(handle).ok_or(Errno::EBADF)?;
        if offset == 0 {
            // A program that begins anew wants to see what has changed.
            directory.listing.lock().page = None;
        }
        for (at, dot) in [".", ".."].iter().enumerate().skip(offset.min(DOTS) as usize) {
            if add(&directory, OsStr::new(dot), at as u64 + 1, None) {
                return Ok(());
            }
        }
        let mut offset = offset.max(DOTS);
        while let Some(page) = self.page_at(&directory, offset)? {
            let entries = page.entries_from(offset).unwrap_or_default();
            for entry in entries {
                offset += 1;
                if add(&directory, OsStr::from_bytes(&entry.name.0), offset, Some((entry, page.since))) {
                    return Ok(());
                }
            }
            if entries.is_empty() || page.page.next.is_none() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Adds names from an offset on.
    pub(crate) fn read_directory(
        &self,
        handle: u64,
        offset: u64,
        reply: &mut ReplyDirectory,
    ) -> Result<(), Errno> {
        self.add_entries(handle, offset, |directory, name, next, entry| {
            let (ino, kind) = match entry {
                None => (directory.inode.ino, FileType::Directory),
                Some((entry, _)) => (self.number_of(entry), kind_of(entry)),
            };
            reply.add(INodeNo(ino), next, kind, name)
        })
    }

    fn number_of(&self, entry: &DirectoryEntry) -> u64 {
        entry.attributes.and_then(|of| self.inodes.find(of.id)).map_or(entry.ino, |inode| inode.ino)
    }

    /// Adds names with their attributes from an offset on. Each name that fits counts as looked up. A name whose attributes
    /// the client may not see is left out.
    pub(crate) fn read_directory_plus(
        &self,
        handle: u64,
        offset: u64,
        reply: &mut ReplyDirectoryPlus,
    ) -> Result<(), Errno> {
        let directory = self.directories.get(handle).ok_or(Errno::EBADF)?;
        let own = if offset < DOTS { Some(self.attributes(directory.inode.ino)?) } else { None };
        self.add_entries(handle, offset, |_, name, next, listed| {
            let Some((entry, since)) = listed else {
                return own.is_some_and(|own| reply.add(own.ino, next, name, &self.ttl, &own, Generation(0)));
            };
            let Some(found) = entry.attributes.as_ref().and_then(|of| self.entry(of, since).ok()) else {
                return false;
            };
            // The kernel counts from now on.
            let ttl = self.ttl.saturating_sub(since.elapsed());
            let is_full = reply.add(found.attr.ino, next, name, &ttl, &found.attr, found.generation);
            if is_full {
                self.inodes.forget(found.attr.ino.0, 1);
            }
            is_full
        })
    }

    /// A directory is closed.
    pub(crate) fn close_directory(&self, handle: u64) {
        self.directories.remove(handle);
    }

    /// Makes the names of a directory persistent.
    pub(crate) fn synchronize_directory(&self, ino: u64) -> Result<(), Errno> {
        self.remote.sync(self.inode(ino)?.id).map_err(|error| errno(&error))
    }

    /// The target of a symbolic link.
    pub(crate) fn read_link(&self, ino: u64) -> Result<OsString, Errno> {
        let id = self.inode(ino)?.id;
        Ok(self.remote.read_link(id).map_err(|error| errno(&error))?.into_os_string())
    }
}

fn kind_of(entry: &DirectoryEntry) -> FileType {
    entry.kind.or(entry.attributes.map(|of| of.kind)).map_or(FileType::RegularFile, file_type)
}
