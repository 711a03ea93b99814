//! Names and attributes.

use std::ffi::OsStr;
use std::ops::Deref;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fuser::{Errno, FileAttr, Generation, OpenFlags, RenameFlags};
use rustix::fs::{FileType, OFlags};
use terrace_export::{Attributes, DirectoryEntry, FileId, FileKind, RenameMode, SetAttributes};

use crate::attributes::{errno, file_attr};
use crate::files::access_of;
use crate::inodes::Inode;
use crate::mount::Mount;
use crate::remote::{Remote, RemoteOpen};
use crate::repeat;

/// For no longer than this, a directory that was made here is believed to lack others' names: the kernel keeps no name that is
/// absent, so no other limit than `--cache` would hold.
const NEW_DIRECTORY_AGE_MAX: Duration = Duration::from_secs(1);
/// The permission bit with which the owner of a directory finds names in it.
const SEARCH_BY_OWNER: u32 = 0o100;

/// The user of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// What an answer to the kernel says of a file.
pub(crate) struct Entry {
    pub(crate) attr: FileAttr,
    pub(crate) generation: Generation,
}

/// A directory in which a request makes or removes a name. When this is dropped, what was read of the directory before is old.
struct ChangingDirectory<R: Remote>(Arc<Inode<R>>);

impl<R: Remote> Deref for ChangingDirectory<R> {
    type Target = Inode<R>;

    fn deref(&self) -> &Inode<R> {
        &self.0
    }
}

impl<R: Remote> Drop for ChangingDirectory<R> {
    fn drop(&mut self) {
        self.0.note_attributes();
    }
}

impl<R: Remote> Mount<R> {
    /// The inode of a number that the kernel holds.
    pub(crate) fn inode(&self, ino: u64) -> Result<Arc<Inode<R>>, Errno> {
        self.inodes.get(ino).ok_or(Errno::ESTALE)
    }

    /// The directory of a request that makes or removes a name.
    fn changing(&self, ino: u64) -> Result<ChangingDirectory<R>, Errno> {
        Ok(ChangingDirectory(self.inode(ino)?))
    }

    /// The directory of a request that makes this name.
    fn making(&self, ino: u64, name: &OsStr) -> Result<ChangingDirectory<R>, Errno> {
        let directory = self.changing(ino)?;
        directory.add_name(name);
        Ok(directory)
    }

    /// The file of a name.
    pub(crate) fn lookup(&self, parent: u64, name: &OsStr) -> Result<Entry, Errno> {
        let directory = self.inode(parent)?;
        if directory.is_absent(name, self.ttl.min(NEW_DIRECTORY_AGE_MAX)) {
            return Err(Errno::ENOENT);
        }
        let since = Instant::now();
        let attributes = self.remote.lookup(directory.id, name).map_err(|error| errno(&error))?;
        self.entry(&attributes, since)
    }

    /// An answer that names the file whose attributes the server was asked for at a time `since`. The kernel takes the length from
    /// it, so what programs here have written meanwhile, or before, has to show.
    pub(crate) fn entry(&self, attributes: &Attributes, since: Instant) -> Result<Entry, Errno> {
        let inode = self.inodes.look_up(attributes.id);
        let fresh = if inode.has_changed_since(since) { self.attributes_of(&inode) } else { Ok(*attributes) };
        match fresh {
            Ok(fresh) => {
                Ok(Entry { attr: file_attr(inode.ino, &fresh), generation: Generation(fresh.id.generation) })
            }
            Err(errno) => {
                // No answer names the inode.
                self.inodes.forget(inode.ino, 1);
                Err(errno)
            }
        }
    }

    /// The file of a name in a directory that was listed at a time `since`. Its attributes are asked for if the server could not
    /// read them then: without the right to search the directory, or without a descriptor.
    pub(crate) fn listed_entry(
        &self,
        directory: u64,
        listed: &DirectoryEntry,
        since: Instant,
    ) -> Result<Entry, Errno> {
        match &listed.attributes {
            Some(attributes) => self.entry(attributes, since),
            None => self.lookup(directory, OsStr::from_bytes(&listed.name.0)),
        }
    }

    /// A request has changed attributes of a file other than the one that the kernel names: its names, for one.
    fn note_attributes_of(&self, file: Option<FileId>) {
        if let Some(inode) = file.and_then(|file| self.inodes.find(file)) {
            inode.note_attributes();
        }
    }

    /// The attributes of a file.
    pub(crate) fn attributes(&self, ino: u64) -> Result<FileAttr, Errno> {
        let inode = self.inode(ino)?;
        Ok(file_attr(ino, &self.attributes_of(&inode)?))
    }

    fn attributes_of(&self, inode: &Inode<R>) -> Result<Attributes, Errno> {
        if inode.is_behind()
            && let Some(attributes) = self.settle(inode)?
        {
            return Ok(attributes);
        }
        match self.remote.attributes(inode.id) {
            // A deleted file is reached by an open one.
            Err(error) if errno(&error).code() == Errno::ESTALE.code() => match inode.any_open() {
                Some(file) => file.remote.attributes().map_err(|error| errno(&error)),
                None => Err(errno(&error)),
            },
            result => result.map_err(|error| errno(&error)),
        }
    }

    /// Sets attributes; the length of an open file if `handle` is given, with the right that it was opened with.
    pub(crate) fn set_attributes(
        &self,
        ino: u64,
        handle: Option<u64>,
        set: &SetAttributes,
    ) -> Result<FileAttr, Errno> {
        let inode = self.inode(ino)?;
        // Later than the writes before it, whose time must not replace one that is set here.
        self.settle(&inode)?;
        if let Some(len) = set.len {
            inode.note_change();
            inode.len.store(len, Ordering::Relaxed);
            if let Some(handle) = handle {
                let file = self.file(handle)?;
                let result = file.remote.truncate(len).map_err(|error| errno(&error));
                inode.note_change();
                result?;
                let rest = SetAttributes { len: None, ..*set };
                return match rest == SetAttributes::default() {
                    true => Ok(file_attr(ino, &self.attributes_of(&inode)?)),
                    false => self.set_rest(&inode, &rest),
                };
            }
        }
        self.set_rest(&inode, set)
    }

    fn set_rest(&self, inode: &Inode<R>, set: &SetAttributes) -> Result<FileAttr, Errno> {
        // Who may search a directory may change.
        inode.forget_names();
        let result = self.remote.set_attributes(inode.id, set).map_err(|error| errno(&error));
        match set.len {
            Some(_) => inode.note_change(),
            None => inode.note_attributes(),
        }
        Ok(file_attr(inode.ino, &result?))
    }

    /// Gives a new file to the caller, where the mount serves other users than its own.
    fn give_to(&self, caller: Caller, parent: FileId, made: &Attributes) -> Result<Attributes, Errno> {
        if !self.serves_others || (made.uid == caller.uid && made.gid == caller.gid) {
            return Ok(*made);
        }
        let parent_attributes = self.remote.attributes(parent).map_err(|error| errno(&error))?;
        // Below a directory with this bit, a file has the directory's group, and the server has seen to it.
        let has_group_of_parent = parent_attributes.mode & 0o2000 != 0;
        let set = SetAttributes {
            uid: Some(caller.uid),
            gid: (!has_group_of_parent).then_some(caller.gid),
            // A change of the owner clears set-user-ID and set-group-ID.
            mode: (made.mode & 0o6000 != 0 && made.kind != FileKind::SymbolicLink).then_some(made.mode),
            ..SetAttributes::default()
        };
        self.remote.set_attributes(made.id, &set).map_err(|error| errno(&error))
    }

    /// The answer for a file that a request has made. One that is found after the answer was lost may be another's, so it is
    /// not given to the caller.
    fn made(
        &self,
        caller: Caller,
        parent: FileId,
        name: &OsStr,
        result: Result<Option<Attributes>, terrace_export::ExportError>,
    ) -> Result<Entry, Errno> {
        let since = Instant::now();
        match result.map_err(|error| errno(&error))? {
            Some(attributes) => self.entry(&self.give_to(caller, parent, &attributes)?, since),
            None => self.entry(&self.remote.lookup(parent, name).map_err(|error| errno(&error))?, since),
        }
    }

    /// Makes a directory.
    pub(crate) fn make_directory(
        &self,
        caller: Caller,
        parent: u64,
        name: &OsStr,
        mode: u32,
    ) -> Result<Entry, Errno> {
        let (parent, since) = (self.making(parent, name)?, Instant::now());
        let make = || self.remote.make_directory(parent.id, name, mode & 0o7777);
        let result = repeat::once(Errno::EEXIST, make);
        let is_searchable = matches!(&result, Ok(Some(made)) if made.mode & SEARCH_BY_OWNER != 0);
        let entry = self.made(caller, parent.id, name, result)?;
        if is_searchable && let Some(inode) = self.inodes.get(entry.attr.ino.0) {
            inode.begin_names(since);
        }
        Ok(entry)
    }

    /// Makes a symbolic link.
    pub(crate) fn symlink(
        &self,
        caller: Caller,
        parent: u64,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<Entry, Errno> {
        let parent = self.making(parent, name)?;
        let result = repeat::once(Errno::EEXIST, || self.remote.symlink(parent.id, name, target));
        self.made(caller, parent.id, name, result)
    }

    /// Makes a FIFO or an empty regular file. Exports have no sockets and no devices.
    pub(crate) fn make_node(
        &self,
        caller: Caller,
        parent: u64,
        name: &OsStr,
        mode: u32,
    ) -> Result<Entry, Errno> {
        match FileType::from_raw_mode(mode) {
            FileType::Fifo => {
                let parent = self.making(parent, name)?;
                let make = || self.remote.make_fifo(parent.id, name, mode & 0o7777);
                self.made(caller, parent.id, name, repeat::once(Errno::EEXIST, make))
            }
            FileType::RegularFile => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
                let (entry, handle) =
                    self.create(caller, parent, name, mode, OpenFlags(flags.bits() as i32))?;
                self.release(handle)?;
                Ok(entry)
            }
            _ => Err(Errno::EPERM),
        }
    }

    /// Makes a regular file and opens it.
    ///
    /// Where the mount serves other users, a file that exists is never opened here: the server would check the rights of the
    /// mount's user, and the kernel checks the caller's only when it looks the file up and opens it. `ESTALE` has it do so.
    ///
    /// # Errors
    /// `EEXIST` if the caller asks for a new file and there is one; `ESTALE`; those of the server.
    pub(crate) fn create(
        &self,
        caller: Caller,
        parent: u64,
        name: &OsStr,
        mode: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, u64), Errno> {
        let (parent, since) = (self.making(parent, name)?, Instant::now());
        let access = access_of(flags);
        let is_exclusive = OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::EXCL);
        let may_be_there = !is_exclusive && !self.serves_others;
        let remote = match self.remote.create(parent.id, name, mode & 0o7777, access, !may_be_there) {
            Ok(remote) => remote,
            Err(error) if errno(&error).code() == Errno::EEXIST.code() && !is_exclusive => {
                return Err(Errno::ESTALE);
            }
            Err(error) => return Err(errno(&error)),
        };
        let given = self.give_to(caller, parent.id, &remote.opened_attributes())?;
        let entry = self.entry(&given, since)?;
        let inode = self.inode(entry.attr.ino.0)?;
        Ok((entry, self.add_created(&inode, remote, flags)))
    }

    /// Makes a further name.
    pub(crate) fn link(&self, ino: u64, parent: u64, name: &OsStr) -> Result<Entry, Errno> {
        let inode = self.inode(ino)?;
        let (parent, since) = (self.making(parent, name)?, Instant::now());
        let result = repeat::once(Errno::EEXIST, || self.remote.link(inode.id, parent.id, name));
        let found = result.and_then(|made| made.map_or_else(|| self.remote.lookup(parent.id, name), Ok));
        let entry = match found.map_err(|error| errno(&error)) {
            Ok(attributes) if attributes.id != inode.id => Err(Errno::EEXIST),
            Ok(attributes) => self.entry(&attributes, since),
            Err(errno) => Err(errno),
        };
        // After the answer, which has the attributes as the link has changed them.
        inode.note_attributes();
        entry
    }

    /// Removes a name of a file.
    pub(crate) fn unlink(&self, parent: u64, name: &OsStr) -> Result<(), Errno> {
        let parent = self.changing(parent)?;
        let known = self.remote.known_file(parent.id, name);
        let result = repeat::removal(known, |only| self.remote.unlink(parent.id, name, only), is_gone);
        self.note_attributes_of(known);
        result.map_err(|error| errno(&error))
    }

    /// Removes a directory.
    pub(crate) fn remove_directory(&self, parent: u64, name: &OsStr) -> Result<(), Errno> {
        let parent = self.changing(parent)?;
        let known = self.remote.known_file(parent.id, name);
        let remove = |only| self.remote.remove_directory(parent.id, name, only);
        let result = repeat::removal(known, remove, is_gone);
        result.map_err(|error| errno(&error))
    }

    /// Renames. An exchange whose answer was lost is not repeated, because that would undo it.
    pub(crate) fn rename(
        &self,
        parent: u64,
        name: &OsStr,
        new_parent: u64,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        let (from, to) = (self.changing(parent)?, self.making(new_parent, new_name)?);
        let mode = match flags {
            flags if flags.is_empty() => RenameMode::Replace,
            RenameFlags::RENAME_NOREPLACE => RenameMode::NoReplace,
            RenameFlags::RENAME_EXCHANGE => RenameMode::Exchange,
            _ => return Err(Errno::EINVAL),
        };
        let moved = self.remote.known_file(from.id, name);
        let replaced = self.remote.known_file(to.id, new_name);
        let known = moved.filter(|_| mode != RenameMode::Exchange);
        let rename = |only| self.remote.rename((from.id, name), (to.id, new_name), mode, only);
        let has_new_name =
            |file, _| self.remote.lookup(to.id, new_name).is_ok_and(|attributes| attributes.id == file);
        let result = repeat::removal(known, rename, has_new_name);
        self.note_attributes_of(moved);
        self.note_attributes_of(replaced);
        result.map_err(|error| errno(&error))
    }
}

/// Whether a repeated removal has failed because the name is gone.
fn is_gone(_: FileId, errno: i32) -> bool {
    errno == Errno::ENOENT.code()
}
