//! Open directories.
//!
//! Names are read from the server within the kernel's request, never kept for the next one: the kernel takes attributes and
//! names from the answer that may have changed since an earlier request.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use fuser::{Errno, FileType, Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus};
use terrace_export::DirectoryEntry;
use terrace_sync::Mutex;

use crate::attributes::{errno, file_type};
use crate::inodes::Inode;
use crate::mount::Mount;
use crate::remote::Remote;

/// An open directory.
pub(crate) struct OpenDirectory<R: Remote> {
    inode: Arc<Inode<R>>,
    /// Where the server goes on behind each entry that the kernel has got: offset n of the kernel is `cookies[n - DOTS]`.
    /// The server's cookies may be any numbers.
    cookies: Mutex<Vec<u64>>,
}

/// The entries before the names: `.` and `..`.
const DOTS: u64 = 2;

impl<R: Remote> OpenDirectory<R> {
    /// The server's cookie for an offset of the kernel.
    fn cookie_at(&self, offset: u64) -> Option<u64> {
        self.cookies.lock().get(offset.saturating_sub(DOTS) as usize).copied()
    }

    /// Remembers where the server goes on behind the entry that ends at `offset`.
    fn remember(&self, offset: u64, cookie: u64) {
        let mut cookies = self.cookies.lock();
        cookies.truncate((offset - DOTS) as usize);
        cookies.push(cookie);
    }
}

impl<R: Remote> Mount<R> {
    /// Opens a directory.
    pub(crate) fn open_directory(&self, ino: u64) -> Result<u64, Errno> {
        let directory = OpenDirectory { inode: self.inode(ino)?, cookies: Mutex::new(vec![0]) };
        Ok(self.directories.add(Arc::new(directory)))
    }

    /// Adds entries from an offset on, until `add` says that there is no room: `add(name, offset of the next, entry)`, where
    /// the entry is `None` for `.` and `..`.
    fn add_entries(
        &self,
        handle: u64,
        offset: u64,
        mut add: impl FnMut(&OpenDirectory<R>, &OsStr, u64, Option<&DirectoryEntry>) -> bool,
    ) -> Result<(), Errno> {
        let directory = self.directories.get(handle).ok_or(Errno::EBADF)?;
        for (at, dot) in [".", ".."].iter().enumerate().skip(offset.min(DOTS) as usize) {
            if add(&directory, OsStr::new(dot), at as u64 + 1, None) {
                return Ok(());
            }
        }
        let mut offset = offset.max(DOTS);
        let mut next = directory.cookie_at(offset);
        while let Some(cookie) = next {
            let page = self
                .remote
                .read_directory(directory.inode.id, cookie, true)
                .map_err(|error| errno(&error))?;
            for entry in &page.entries {
                offset += 1;
                directory.remember(offset, entry.cookie);
                if add(&directory, OsStr::from_bytes(&entry.name.0), offset, Some(entry)) {
                    return Ok(());
                }
            }
            next = page.next.filter(|_| !page.entries.is_empty());
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
                Some(entry) => (self.number_of(entry), kind_of(entry)),
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
        let own = self.attributes(directory.inode.ino)?;
        self.add_entries(handle, offset, |_, name, next, entry| {
            let Some(entry) = entry else {
                return reply.add(own.ino, next, name, &self.ttl, &own, Generation(0));
            };
            let Some(found) = entry.attributes.as_ref().and_then(|of| self.entry(of).ok()) else {
                return false;
            };
            let is_full = reply.add(found.attr.ino, next, name, &self.ttl, &found.attr, found.generation);
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
