//! What a server does with a request.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::connection::Connection;
use super::holdings::Holding;
use super::identity::act_as;
use super::opens::{Open, Rights, layout_error, region};
use super::state::State;
use super::tree::{self, by_descriptor, check_name};
use super::watches::Interest;
use crate::ends::{OpenPair, SERVED_ACCESS};
use crate::error::{UNKNOWN_FILE, UNKNOWN_OPEN};
use crate::proto::{
    Answer, Attributes, CONTENT_BYTES_MAX, FileId, FileKind, OpenAccess, Opened, RenameMode, Request,
    Revocation, SetAttributes, Text,
};

/// The most open files of a connection.
const OPENS_MAX: usize = 65_536;
/// The most watches of a connection.
const WATCHES_MAX: usize = 16_384;

/// How often a name is tried that others remove and make while a client creates a file.
const CREATE_TRIES: usize = 100;

/// Why a request is not done.
#[derive(Debug)]
pub enum Refusal {
    System(io::Error),
    UnknownFile,
    UnknownOpen,
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Refusal {
        Refusal::System(error)
    }
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Refusal {
        Refusal::System(errno.into())
    }
}

impl Refusal {
    fn errno(&self) -> u16 {
        match self {
            Refusal::UnknownFile => UNKNOWN_FILE,
            Refusal::UnknownOpen => UNKNOWN_OPEN,
            Refusal::System(error) => {
                let errno = error.raw_os_error().or(match error.kind() {
                    io::ErrorKind::ResourceBusy => Some(Errno::BUSY.raw_os_error()),
                    io::ErrorKind::PermissionDenied => Some(Errno::ACCESS.raw_os_error()),
                    io::ErrorKind::FileTooLarge => Some(Errno::FBIG.raw_os_error()),
                    _ => None,
                });
                errno.unwrap_or(Errno::IO.raw_os_error()) as u16
            }
        }
    }
}

/// What becomes of a request.
pub type Outcome = Result<Answer, Refusal>;

/// One request of a client.
pub struct Serving<'a> {
    pub state: &'a State,
    pub connection: &'a Arc<Connection>,
}

impl Serving<'_> {
    /// Carries a request out.
    pub fn serve(&self, request: Request) -> Answer {
        if self.connection.identity.is_read_only && changes(&request) {
            return Answer::Failed { errno: Errno::ROFS.raw_os_error() as u16 };
        }
        self.carry_out(request).unwrap_or_else(|refusal| Answer::Failed { errno: refusal.errno() })
    }

    fn carry_out(&self, request: Request) -> Outcome {
        match request {
            Request::Lookup { parent, name } => self.lookup(parent, &name),
            Request::LookupPath { path } => self.lookup_path(&path, true),
            Request::Reclaim { id, path } => self.reclaim(id, &path),
            Request::GetAttributes { id } => {
                let attributes = tree::attributes(self.file(id)?.as_fd())?;
                Ok(Answer::Attributes { attributes })
            }
            Request::SetAttributes { id, set } => self.set_attributes(id, &set),
            Request::CheckAccess { id, mode } => {
                let file = self.file(id)?;
                self.act(|| tree::check_access(file.as_fd(), mode))?;
                Ok(Answer::Done {})
            }
            Request::Open { id, access, content_max } => self.open(id, access, content_max),
            Request::Create { parent, name, mode, access, exclusive } => {
                self.create(parent, &name, mode, access, exclusive)
            }
            Request::Close { open } => self.close(open),
            Request::MakeDirectory { parent, name, mode } => {
                self.make(parent, &name, |parent, name| tree::make_directory(parent, name, mode))
            }
            Request::MakeFifo { parent, name, mode } => {
                self.make(parent, &name, |parent, name| tree::make_fifo(parent, name, mode))
            }
            Request::Symlink { parent, name, target } => {
                self.make(parent, &name, |parent, name| tree::symlink(parent, name, &target))
            }
            Request::Link { id, parent, name } => {
                let file = self.file(id)?;
                self.make(parent, &name, |parent, name| tree::link(file.as_fd(), parent, name))
            }
            Request::Unlink { parent, name, only } => self.unlink(parent, &name, false, only),
            Request::RemoveDirectory { parent, name, only } => self.unlink(parent, &name, true, only),
            Request::Rename { parent, name, new_parent, new_name, mode, only } => {
                self.rename((parent, &name), (new_parent, &new_name), mode, only)
            }
            Request::ReadLink { id } => {
                let file = self.file(id)?;
                Ok(Answer::Text { text: tree::read_link(file.as_fd())? })
            }
            Request::ReadDirectory { id, cookie, attributes } => self.read_directory(id, cookie, attributes),
            Request::GetFileSystem { id } => {
                Ok(Answer::FileSystem { file_system: tree::file_system(self.file(id)?.as_fd())? })
            }
            Request::Truncate { open, len } => self.change_layout(open, OpenAccess::WRITE, |open| {
                open.region.truncate(len).map_err(layout_error)
            }),
            Request::Grow { open, len } => self
                .change_layout(open, OpenAccess::WRITE, |open| open.region.grow(len).map_err(layout_error)),
            Request::Punch { open, offset, len } => self.change_layout(open, OpenAccess::WRITE, |open| {
                open.region.punch_hole(offset, len).map_err(layout_error)
            }),
            Request::Write { open, offset, data } => self.change_layout(open, OpenAccess::WRITE, |open| {
                open.region.write(offset, &data.0).map_err(layout_error)
            }),
            Request::GetOpenAttributes { open } => {
                let open = self.opened(open)?;
                Ok(Answer::Attributes { attributes: tree::attributes(open.node.as_fd())? })
            }
            Request::FindData { open, offset } => {
                let data = self.opened(open)?.region.next_data(offset)?;
                Ok(Answer::Data { start: data.start, end: data.end })
            }
            Request::Sync { id } => {
                let file = self.file(id)?;
                let opened = self.act(|| tree::open_to_sync(file.as_fd()))?;
                self.state.files.sync(opened.as_fd())?;
                Ok(Answer::Done {})
            }
            Request::Lock { id, owner, kind } => self.lock(id, owner, kind),
            Request::ReclaimLock { id, owner, kind, instance } => {
                self.reclaim_lock(id, owner, kind, instance)
            }
            Request::Watch { id, on } => self.watch(id, on),
            // Connection::receive answers it.
            Request::Renew {} => Ok(Answer::Done {}),
            Request::Pair { link, endpoint } => {
                let pair = OpenPair::new(&self.connection.domain.pd, &self.state.cq, 0).map_err(no_memory)?;
                if let Err(error) = pair.connect(self.connection.path, endpoint, SERVED_ACCESS) {
                    crate::ends::destroy(&pair.qp);
                    return Err(no_memory(error));
                }
                self.connection.replace_pair(link, pair.qp);
                Ok(Answer::Paired { endpoint: pair.endpoint })
            }
        }
    }

    /// Calls `act` as the client's user.
    pub fn act<T>(&self, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        act_as(&self.connection.identity, act)
    }

    /// A file that the client knows.
    pub fn file(&self, id: FileId) -> Result<Arc<OwnedFd>, Refusal> {
        if id == self.state.root_id {
            return Ok(self.state.root.clone());
        }
        self.connection.nodes.get(id).ok_or(Refusal::UnknownFile)
    }

    fn opened(&self, open: u64) -> Result<Arc<Open>, Refusal> {
        self.connection.opens.lock().get(&open).cloned().ok_or(Refusal::UnknownOpen)
    }

    /// Adds a file to those that the client knows.
    fn found(&self, file: OwnedFd) -> Result<Attributes, Refusal> {
        let attributes = tree::attributes(file.as_fd())?;
        if attributes.id != self.state.root_id {
            self.connection.nodes.add(attributes.id, file);
        }
        Ok(attributes)
    }

    fn lookup(&self, parent: FileId, name: &Text) -> Outcome {
        let (parent, name) = (self.file(parent)?, check_name(name)?);
        let file = self.act(|| tree::lookup(parent.as_fd(), name))?;
        Ok(Answer::Attributes { attributes: self.found(file)? })
    }

    fn lookup_path(&self, path: &Text, follow: bool) -> Outcome {
        let file = self.act(|| tree::lookup_path(self.state.root.as_fd(), &path.0, follow))?;
        Ok(Answer::Attributes { attributes: self.found(file)? })
    }

    fn reclaim(&self, id: FileId, path: &Text) -> Outcome {
        let stale = |error: io::Error| match Errno::from_io_error(&error) {
            Some(Errno::NOENT | Errno::NOTDIR) => Errno::STALE.into(),
            _ => error,
        };
        let file = self.act(|| tree::lookup_path(self.state.root.as_fd(), &path.0, false)).map_err(stale)?;
        if tree::attributes(file.as_fd())?.id != id {
            return Err(Errno::STALE.into());
        }
        Ok(Answer::Attributes { attributes: self.found(file)? })
    }

    fn set_attributes(&self, id: FileId, set: &SetAttributes) -> Outcome {
        let file = self.file(id)?;
        if let Some(len) = set.len {
            let opened = self.act(|| tree::open(file.as_fd(), OpenAccess::WRITE))?;
            self.drop_privileges(file.as_fd())?;
            region(&self.state.files, &opened, true)?.truncate(len).map_err(layout_error)?;
        }
        let changes_rights = set.mode.is_some() || set.uid.is_some() || set.gid.is_some();
        if changes_rights {
            // The client keeps the keys that it has: what it does to itself is no surprise to it.
            let change = || self.act(|| tree::set_attributes(file.as_fd(), set));
            self.keep_own(id, change, |open, attributes| {
                // Otherwise the key is checked, and revoked.
                if let Ok(rights) = Rights::of(open.node.as_fd(), attributes) {
                    *open.rights.lock() = rights;
                }
            })?;
            self.state.check_rights(id);
        } else {
            self.act(|| tree::set_attributes(file.as_fd(), set))?;
        }
        Ok(Answer::Attributes { attributes: tree::attributes(file.as_fd())? })
    }

    /// Calls `change`, which changes the rights or the number of names of a file. `keep` is called with the client's own openings of it and
    /// the file's new attributes, so that their keys stay valid.
    fn keep_own(
        &self,
        id: FileId,
        change: impl FnOnce() -> io::Result<()>,
        keep: impl Fn(&Open, &Attributes),
    ) -> io::Result<()> {
        let own = self.state.opens_of(self.connection, id);
        if own.is_empty() {
            return change();
        }
        let _checking = self.state.checking.lock();
        change()?;
        for open in own {
            if let Ok(attributes) = tree::attributes(open.node.as_fd()) {
                keep(&open, &attributes);
            }
        }
        Ok(())
    }

    fn open(&self, id: FileId, access: OpenAccess, content_max: u16) -> Outcome {
        if self.connection.identity.is_read_only
            && (access.changes() || access.contains(OpenAccess::TRUNCATE))
        {
            return Err(Errno::ROFS.into());
        }
        let holding = self.hold()?;
        let node = self.file(id)?;
        let rights = Rights::of(node.as_fd(), &tree::attributes(node.as_fd())?)?;
        let file = self.act(|| tree::open(node.as_fd(), access))?;
        let opened = self.finish_open(holding, node, &file, access, rights)?;
        let content = content(&file, &opened, access, content_max);
        Ok(Answer::Opened { opened, content })
    }

    /// Makes a file, or opens the one that has the name. With a request's number only the file that this request has made is opened.
    fn create(
        &self,
        parent: FileId,
        name: &Text,
        mode: u32,
        access: OpenAccess,
        exclusive: Option<u64>,
    ) -> Outcome {
        let (parent, name) = (self.file(parent)?, check_name(name)?);
        for _ in 0..CREATE_TRIES {
            match self.create_new(&parent, name, mode, access, exclusive) {
                Err(Refusal::System(error)) if Errno::from_io_error(&error) == Some(Errno::EXIST) => {}
                created => return created,
            }
            let found = self.act(|| tree::lookup(parent.as_fd(), name));
            match (found, exclusive) {
                (Ok(file), None) => return self.open(self.found(file)?.id, access, 0),
                (Ok(file), Some(request)) => return self.open_made(self.found(file)?, access, request),
                (Err(_), Some(_)) => return Err(Errno::EXIST.into()),
                // Another client has removed it.
                (Err(error), None) if Errno::from_io_error(&error) == Some(Errno::NOENT) => {}
                (Err(error), None) => return Err(error.into()),
            }
        }
        Err(Errno::NOENT.into())
    }

    fn create_new(
        &self,
        parent: &OwnedFd,
        name: &[u8],
        mode: u32,
        access: OpenAccess,
        exclusive: Option<u64>,
    ) -> Outcome {
        let holding = self.hold()?;
        let made = &self.state.made;
        // Others have numbers that no request repeats: their files are nobody else's.
        let begun = made.begin(self.connection.client, exclusive.unwrap_or_else(rand::random));
        // Who makes a file may access it as wanted, whatever its mode says; a region needs it readable.
        let created = self.act(|| tree::create(parent.as_fd(), name, mode, access | OpenAccess::READ));
        let Ok(file) = created else {
            made.forget(begun);
            return Err(created.err().map_or(Errno::IO.into(), Refusal::from));
        };
        let node =
            rustix::fs::open(by_descriptor(file.as_fd()), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let attributes = self.found(node)?;
        made.end(begun, attributes.id);
        let node = self.file(attributes.id)?;
        let rights = Rights::of(node.as_fd(), &attributes)?;
        let opened = self.finish_open(holding, node, &file, access, rights)?;
        Ok(Answer::Opened { opened, content: None })
    }

    /// Opens the file that has the name that a request was to make, if an earlier one with this number has made it: its answer was lost.
    fn open_made(&self, found: Attributes, access: OpenAccess, request: u64) -> Outcome {
        let (client, uid) = (self.connection.client, self.connection.identity.uid);
        if found.kind != FileKind::Regular || !self.state.made.claim(client, request, uid, &found) {
            return Err(Errno::EXIST.into());
        }
        let holding = self.hold()?;
        let node = self.file(found.id)?;
        let rights = Rights::of(node.as_fd(), &found)?;
        // Not as the client's user: the mode may permit the user less than the creator has. The file was empty when it was made.
        let access = access & !OpenAccess::TRUNCATE;
        let file = tree::open(node.as_fd(), access | OpenAccess::READ)?;
        let opened = self.finish_open(holding, node, &file, access, rights)?;
        Ok(Answer::Opened { opened, content: None })
    }

    /// Clears the set-user-ID and set-group-ID bits of a file that the client's user may write from now on: one-sided writes
    /// pass the kernel by, which would do so. Root keeps them, as it does locally.
    fn drop_privileges(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        if self.connection.identity.uid == 0 { Ok(()) } else { tree::drop_privileges(file) }
    }

    /// Counts a file that the client opens, before anything is done for it.
    fn hold(&self) -> Result<Holding, Errno> {
        if self.connection.opens.lock().len() >= OPENS_MAX {
            return Err(Errno::MFILE);
        }
        self.state.holdings.take(self.connection.holder).ok_or(Errno::NFILE)
    }

    /// Makes an opened file one of the client's. `rights` are those before it was opened, or those that it was made with.
    fn finish_open(
        &self,
        holding: Holding,
        node: Arc<OwnedFd>,
        file: &OwnedFd,
        access: OpenAccess,
        rights: Rights,
    ) -> Result<Opened, Refusal> {
        if access.changes() {
            self.drop_privileges(node.as_fd())?;
        }
        let state = self.state;
        let open = Open::new(&state.files, &self.connection.domain, holding, node, file, access, rights)?;
        let open = Arc::new(open);
        let attributes = tree::attributes(open.node.as_fd())?;
        if attributes.links == 0 && !state.rules.keep_unlinked {
            state.revoke(vec![(open, ())], drop);
            return Err(Errno::STALE.into());
        }
        let number = state.add_open(self.connection, open.clone());
        let lost = state.check_opened(self.connection, number);
        if self.connection.has_ended() {
            // The thread that ended it may have missed this file.
            state.release_all(self.connection);
        }
        match lost {
            Some(Revocation::Unlinked) => return Err(Errno::STALE.into()),
            Some(Revocation::Permission) => return Err(Errno::ACCESS.into()),
            None => {}
        }
        Ok(Opened { open: number, key: open.key(&attributes), attributes })
    }

    fn close(&self, open: u64) -> Outcome {
        let closed = self.connection.opens.lock().remove(&open).ok_or(Refusal::UnknownOpen)?;
        self.state.release(self.connection, open, closed);
        Ok(Answer::Done {})
    }

    /// Makes a file of a name that is no regular file, and looks it up.
    fn make(
        &self,
        parent: FileId,
        name: &Text,
        make: impl FnOnce(BorrowedFd<'_>, &[u8]) -> io::Result<()>,
    ) -> Outcome {
        let (parent, name) = (self.file(parent)?, check_name(name)?);
        let file = self.act(|| {
            make(parent.as_fd(), name)?;
            tree::lookup(parent.as_fd(), name)
        })?;
        Ok(Answer::Attributes { attributes: self.found(file)? })
    }

    fn unlink(&self, parent: FileId, name: &Text, is_directory: bool, only: Option<FileId>) -> Outcome {
        let (parent, name) = (self.file(parent)?, check_name(name)?);
        self.check_only(&parent, name, only)?;
        self.remove_name(&parent, name, || tree::unlink(parent.as_fd(), name, is_directory))?;
        Ok(Answer::Done {})
    }

    fn rename(
        &self,
        from: (FileId, &Text),
        to: (FileId, &Text),
        mode: RenameMode,
        only: Option<FileId>,
    ) -> Outcome {
        let (parent, name) = (self.file(from.0)?, check_name(from.1)?);
        let (new_parent, new_name) = (self.file(to.0)?, check_name(to.1)?);
        self.check_only(&parent, name, only)?;
        self.remove_name(&new_parent, new_name, || {
            tree::rename(parent.as_fd(), name, new_parent.as_fd(), new_name, mode)
        })?;
        Ok(Answer::Done {})
    }

    /// Checks that a name is the file's that the client means. The time from here to the change is short; the repeated
    /// request that this is for comes seconds late.
    fn check_only(&self, parent: &OwnedFd, name: &[u8], only: Option<FileId>) -> io::Result<()> {
        let Some(only) = only else { return Ok(()) };
        let file = self.act(|| tree::lookup(parent.as_fd(), name))?;
        if tree::attributes(file.as_fd())?.id == only { Ok(()) } else { Err(Errno::STALE.into()) }
    }

    /// Calls `change` as the client's user, which may remove a name. Other clients' keys of the file are revoked if that was
    /// its last one.
    fn remove_name(
        &self,
        parent: &OwnedFd,
        name: &[u8],
        change: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let removed = self.act(|| tree::lookup(parent.as_fd(), name));
        let id = removed.and_then(|file| Ok(tree::attributes(file.as_fd())?.id)).ok();
        let change = || self.act(change);
        match id {
            Some(id) => {
                self.keep_own(id, change, |open, attributes| {
                    open.is_unlinked_by_own.fetch_or(attributes.links == 0, Ordering::Relaxed);
                })?;
                self.state.check_rights(id);
            }
            None => change()?,
        }
        Ok(())
    }

    fn read_directory(&self, id: FileId, cookie: u64, with_attributes: bool) -> Outcome {
        let directory = self.file(id)?;
        let (page, found) = self.act(|| tree::read_directory(directory.as_fd(), cookie, with_attributes))?;
        for (id, file) in found {
            self.connection.nodes.add(id, file);
        }
        Ok(Answer::Directory { page })
    }

    fn change_layout(
        &self,
        open: u64,
        needed: OpenAccess,
        change: impl FnOnce(&Open) -> io::Result<()>,
    ) -> Outcome {
        let open = self.opened(open)?;
        if !open.access.contains(needed) {
            return Err(Errno::BADF.into());
        }
        // Another thread may just have revoked it.
        let _changing = open.begin_change().ok_or(Refusal::UnknownOpen)?;
        change(&open)?;
        Ok(Answer::Attributes { attributes: tree::attributes(open.node.as_fd())? })
    }

    fn watch(&self, id: FileId, on: bool) -> Outcome {
        let watched = &self.connection.watches;
        if !on {
            if watched.lock().remove(&id) {
                self.state.watches.remove(id);
            }
            return Ok(Answer::Done {});
        }
        if watched.lock().contains(&id) {
            return Ok(Answer::Done {});
        }
        if watched.lock().len() >= WATCHES_MAX {
            return Err(Errno::NOSPC.into());
        }
        // The file system may not answer, and the listener takes the lock.
        let file = self.file(id)?;
        self.act(|| tree::check_access(file.as_fd(), 4))?;
        self.state.watches.add(id, file.as_fd(), Interest::All)?;
        if !watched.lock().insert(id) {
            // Another request of the client has added it meanwhile.
            self.state.watches.remove(id);
        }
        if self.connection.has_ended() {
            self.state.release_all(self.connection);
        }
        Ok(Answer::Done {})
    }
}

/// The bytes of a file that was opened for reading, if they are few: all that it had when its attributes were read.
fn content(file: &OwnedFd, opened: &Opened, access: OpenAccess, max: u16) -> Option<Text> {
    let len = opened.attributes.len;
    let is_wanted = access.contains(OpenAccess::READ) && !access.contains(OpenAccess::TRUNCATE);
    if !is_wanted || len > u64::from(max).min(CONTENT_BYTES_MAX as u64) {
        return None;
    }
    // A client that reads the file itself meets the error.
    tree::read_start(file.as_fd(), len as usize).ok().map(Text)
}

fn no_memory(error: terrace_nic::Error) -> Refusal {
    tracing::debug!(%error, "no queue pair for a client");
    Errno::NOMEM.into()
}

/// Whether a request changes files. Opening for writing is checked where files are opened.
fn changes(request: &Request) -> bool {
    matches!(
        request,
        Request::SetAttributes { .. }
            | Request::Create { .. }
            | Request::MakeDirectory { .. }
            | Request::MakeFifo { .. }
            | Request::Symlink { .. }
            | Request::Link { .. }
            | Request::Unlink { .. }
            | Request::RemoveDirectory { .. }
            | Request::Rename { .. }
            | Request::Truncate { .. }
            | Request::Grow { .. }
            | Request::Punch { .. }
            | Request::Write { .. }
    )
}
