//! Open directories.
//!
//! The server sends more names at once than the kernel takes. The rest is kept for the kernel's next requests, for as long as the
//! kernel may believe names and attributes (`--cache`), and until a program here makes or removes a name in the directory. An
//! attribute of a file that a program here has changed since is asked for anew.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use fuser::{Errno, FileAttr, FileType, Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus};
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

/// What has become of an entry of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Added {
    Yes,
    /// The file is gone.
    LeftOut,
    /// The kernel's buffer has no room for it.
    Full,
}

impl Added {
    fn of(is_full: bool) -> Added {
        if is_full { Added::Full } else { Added::Yes }
    }
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

    /// Keeps a page, and remembers where the server goes on behind each of its entries. What is behind the page stays known: a
    /// program may have been there (`telldir`).
    fn keep(&mut self, page: &Arc<KeptPage>) {
        let first = (page.offset - DOTS + 1) as usize;
        let end = (first + page.page.entries.len()).min(self.cookies.len());
        let cookies = page.page.entries.iter().map(|entry| entry.cookie);
        self.cookies.splice(first..end, cookies);
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
    ///
    /// # Errors
    /// Those of `add` and of the server, for the first entry. A later one is left to the kernel's next request.
    fn add_entries(
        &self,
        handle: u64,
        offset: u64,
        mut add: impl FnMut(
            &OpenDirectory<R>,
            &OsStr,
            u64,
            Option<(&DirectoryEntry, Instant)>,
        ) -> Result<Added, Errno>,
    ) -> Result<(), Errno> {
        let directory = self.directories.get(handle).ok_or(Errno::EBADF)?;
        if offset == 0 {
            // A program that begins anew wants to see what has changed.
            directory.listing.lock().page = None;
        }
        for (at, dot) in [".", ".."].iter().enumerate().skip(offset.min(DOTS) as usize) {
            if add(&directory, OsStr::new(dot), at as u64 + 1, None)? == Added::Full {
                return Ok(());
            }
        }
        let mut is_empty = offset >= DOTS;
        let added = self.add_names(&directory, offset.max(DOTS), |name, next, entry| {
            let added = add(&directory, name, next, Some(entry));
            is_empty &= !matches!(added, Ok(Added::Yes));
            added
        });
        if is_empty { added } else { Ok(()) }
    }

    /// Adds names from an offset on.
    fn add_names(
        &self,
        directory: &OpenDirectory<R>,
        mut offset: u64,
        mut add: impl FnMut(&OsStr, u64, (&DirectoryEntry, Instant)) -> Result<Added, Errno>,
    ) -> Result<(), Errno> {
        while let Some(page) = self.page_at(directory, offset)? {
            let entries = page.entries_from(offset).unwrap_or_default();
            for entry in entries {
                offset += 1;
                if add(OsStr::from_bytes(&entry.name.0), offset, (entry, page.since))? == Added::Full {
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
            Ok(Added::of(reply.add(INodeNo(ino), next, kind, name)))
        })
    }

    fn number_of(&self, entry: &DirectoryEntry) -> u64 {
        entry.attributes.and_then(|of| self.inodes.find(of.id)).map_or(entry.ino, |inode| inode.ino)
    }

    /// Adds names with their attributes from an offset on. Each name that fits counts as looked up. A name that is gone by now is
    /// left out, and no other.
    pub(crate) fn read_directory_plus(
        &self,
        handle: u64,
        offset: u64,
        reply: &mut ReplyDirectoryPlus,
    ) -> Result<(), Errno> {
        let directory = self.directories.get(handle).ok_or(Errno::EBADF)?;
        let own = if offset < DOTS { Some(self.attributes(directory.inode.ino)?) } else { None };
        self.add_entries(handle, offset, |directory, name, next, listed| {
            let Some((entry, since)) = listed else {
                let is_full =
                    own.is_some_and(|own| reply.add(own.ino, next, name, &self.ttl, &own, Generation(0)));
                return Ok(Added::of(is_full));
            };
            match self.listed_entry(directory.inode.ino, entry, since) {
                Ok(found) => {
                    // The kernel counts from now on.
                    let ttl = self.ttl.saturating_sub(since.elapsed());
                    let is_full = reply.add(found.attr.ino, next, name, &ttl, &found.attr, found.generation);
                    if is_full {
                        self.inodes.forget(found.attr.ino.0, 1);
                    }
                    Ok(Added::of(is_full))
                }
                // The kernel looks it up when a program wants more than the name.
                Err(errno) if errno.code() == Errno::EACCES.code() => {
                    let attr = attr_of_unknown(self.inodes.unused_number(), kind_of(entry));
                    let is_full = reply.add(attr.ino, next, name, &Duration::ZERO, &attr, Generation(0));
                    Ok(Added::of(is_full))
                }
                Err(errno) if is_gone(errno) => Ok(Added::LeftOut),
                Err(errno) => Err(errno),
            }
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

fn is_gone(errno: Errno) -> bool {
    [Errno::ENOENT.code(), Errno::ESTALE.code()].contains(&errno.code())
}

/// What the kernel is told of a file whose attributes are unknown, and believes for no time.
fn attr_of_unknown(ino: u64, kind: FileType) -> FileAttr {
    FileAttr {
        ino: INodeNo(ino),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn kind_of(entry: &DirectoryEntry) -> FileType {
    entry.kind.or(entry.attributes.map(|of| of.kind)).map_or(FileType::RegularFile, file_type)
}

#[cfg(test)]
mod tests {
    use terrace_export::proto::Text;

    use super::*;

    /// A page with the entries from an offset of the kernel on, whose cookies are these.
    fn page(offset: u64, cookies: impl Iterator<Item = u64>) -> Arc<KeptPage> {
        let entry = |cookie: u64| {
            let name = Text(cookie.to_string().into_bytes());
            DirectoryEntry { name, cookie, ino: cookie, kind: None, attributes: None }
        };
        let page = DirectoryPage { entries: cookies.map(entry).collect(), next: Some(0) };
        Arc::new(KeptPage { offset, page, since: Instant::now() })
    }

    #[test]
    fn a_program_that_goes_back_finds_the_place_again_where_it_was() {
        let mut listing = Listing::new();
        for at in (0..500).step_by(100) {
            listing.keep(&page(DOTS + at, at + 1000..at + 1100));
        }
        let place = DOTS + 450;
        assert_eq!(listing.cookie_at(place), Some(1449));
        listing.keep(&page(DOTS + 100, 1100..1200));
        assert_eq!(listing.cookie_at(place), Some(1449));
        assert_eq!(listing.cookie_at(DOTS + 150), Some(1149));
        assert_eq!(listing.cookie_at(DOTS + 501), None);
        // Names that others have made since move those behind them, not the places.
        listing.keep(&page(DOTS + 100, (1090..1190).chain(1190..1195)));
        assert_eq!((listing.cookie_at(DOTS + 101), listing.cookie_at(place)), (Some(1090), Some(1449)));
    }
}
