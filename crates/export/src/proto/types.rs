//! What messages are about: files, their attributes, keys.

use bitflags::bitflags;

use super::codec::{DecodeError, Reader, Text, Wire, refuse, wire_enum, wire_struct};

wire_struct! {
    /// A file's identity. It stays the same when the file is renamed, and when the server restarts.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
    FileId {
        /// The number of the file system's device.
        dev: u64,
        /// The inode number.
        ino: u64,
        /// Distinguishes files that get the same inode number one after another: the time of creation in nanoseconds, or 0
        /// if the file system does not keep it.
        generation: u64,
    }
}

wire_enum! {
    /// What a file is.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    FileKind {
        /// A regular file.
        Regular = 1,
        /// A directory.
        Directory = 2,
        /// A symbolic link.
        SymbolicLink = 3,
        /// A FIFO.
        Fifo = 4,
        /// A socket.
        Socket = 5,
        /// A character device.
        CharacterDevice = 6,
        /// A block device.
        BlockDevice = 7,
    }
}

wire_struct! {
    /// A time since the epoch.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
    Timestamp {
        /// Seconds.
        seconds: i64,
        /// Nanoseconds within the second.
        nanoseconds: u32,
    }
}

wire_struct! {
    /// A file's attributes, as `stat(2)` has them.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    Attributes {
        /// The file.
        id: FileId,
        /// What it is.
        kind: FileKind,
        /// Permission bits, with set-user-ID, set-group-ID and sticky bit.
        mode: u32,
        /// The number of names.
        links: u64,
        /// The owner on the server.
        uid: u32,
        /// The group on the server.
        gid: u32,
        /// The device number of a device file.
        rdev: u64,
        /// Length in bytes.
        len: u64,
        /// Allocated blocks of 512 bytes.
        blocks: u64,
        /// The preferred size of accesses in bytes.
        block_bytes: u32,
        /// Last access.
        accessed: Timestamp,
        /// Last change of the contents.
        modified: Timestamp,
        /// Last change of contents or attributes.
        changed: Timestamp,
        /// Changes whenever contents or attributes change through a system call: the time of the last change in
        /// nanoseconds. One-sided writes through mappings change it late.
        version: u64,
    }
}

/// What a time is set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The server's time.
    Now,
    /// This time.
    At(Timestamp),
}

impl Wire for SetTime {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            SetTime::Now => None::<Timestamp>.put(out),
            SetTime::At(time) => Some(*time).put(out),
        }
    }

    fn take(reader: &mut Reader<'_>) -> Result<SetTime, DecodeError> {
        Ok(<Option<Timestamp> as Wire>::take(reader)?.map_or(SetTime::Now, SetTime::At))
    }
}

wire_struct! {
    /// Attributes to set; `None` leaves an attribute as it is.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    SetAttributes {
        /// Permission bits.
        mode: Option<u32>,
        /// Owner.
        uid: Option<u32>,
        /// Group.
        gid: Option<u32>,
        /// Length in bytes.
        len: Option<u64>,
        /// Last access.
        accessed: Option<SetTime>,
        /// Last change of the contents.
        modified: Option<SetTime>,
    }
}

bitflags! {
    /// What a file is opened for. `WRITE` permits appends, too.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct OpenAccess: u8 {
        /// READ.
        const READ = 1;
        /// WRITE, by offset, and APPEND.
        const WRITE = 1 << 1;
        /// APPEND only.
        const APPEND = 1 << 2;
        /// The file is emptied, which needs `WRITE`.
        const TRUNCATE = 1 << 3;
        /// Same-host clients do not map the file, so every access passes through the server's NIC. None takes effect after the
        /// end of the key, whichever process was stopped or killed in the middle of it.
        const UNMAPPED = 1 << 4;
    }
}

impl OpenAccess {
    /// Whether the file may be changed.
    pub fn changes(self) -> bool {
        self.intersects(OpenAccess::WRITE | OpenAccess::APPEND)
    }
}

impl Wire for OpenAccess {
    fn put(&self, out: &mut Vec<u8>) {
        self.bits().put(out);
    }

    fn take(reader: &mut Reader<'_>) -> Result<OpenAccess, DecodeError> {
        let bits = u8::take(reader)?;
        OpenAccess::from_bits(bits).map_or_else(|| refuse("access", bits.into()), Ok)
    }
}

wire_struct! {
    /// What one-sided accesses to an open file need (the paper's *filekey*). Addresses are offsets in the file.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    FileKey {
        /// The key of the file's region, valid on the queue pairs of the connection that opened the file.
        rkey: u32,
        /// The file's length in bytes when it was opened.
        len: u64,
        /// [`Attributes::version`] when it was opened.
        version: u64,
    }
}

wire_struct! {
    /// An open file.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    Opened {
        /// Names the open file in later requests of the connection.
        open: u64,
        /// For one-sided accesses.
        key: FileKey,
        /// The file's attributes.
        attributes: Attributes,
    }
}

wire_enum! {
    /// How a rename treats the new name.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    RenameMode {
        /// A file of the new name is replaced.
        #[default]
        Replace = 0,
        /// A file of the new name is an error.
        NoReplace = 1,
        /// Both names exist, and exchange their files.
        Exchange = 2,
    }
}

wire_enum! {
    /// A lock of a whole file, as `flock(2)` has them.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    LockKind {
        /// Compatible with other shared locks.
        Shared = 1,
        /// Compatible with no other lock.
        Exclusive = 2,
        /// Releases the lock.
        Unlock = 3,
    }
}

wire_struct! {
    /// A name in a directory.
    #[derive(Clone, Debug, PartialEq, Eq)]
    DirectoryEntry {
        /// The name's bytes.
        name: Text,
        /// Where to go on behind this entry.
        cookie: u64,
        /// The inode number.
        ino: u64,
        /// What it is, if the file system says so.
        kind: Option<FileKind>,
        /// The attributes, if they were asked for and the client may see them.
        attributes: Option<Attributes>,
    }
}

wire_struct! {
    /// A part of a directory.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    DirectoryPage {
        /// The names, `.` and `..` not among them.
        entries: Vec<DirectoryEntry>,
        /// Where to go on; `None` at the end.
        next: Option<u64>,
    }
}

wire_struct! {
    /// A file system, as `statvfs(3)` has it.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    FileSystem {
        /// Bytes of a block.
        block_bytes: u64,
        /// Blocks.
        blocks: u64,
        /// Free blocks.
        blocks_free: u64,
        /// Free blocks for users that are not root.
        blocks_available: u64,
        /// Inodes.
        files: u64,
        /// Free inodes.
        files_free: u64,
        /// Most bytes of a name.
        name_bytes_max: u64,
    }
}

bitflags! {
    /// What has changed about a watched file.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ChangeSet: u8 {
        /// The contents, as far as system calls changed them. One-sided writes do not show.
        const CONTENTS = 1;
        /// Owner, mode, times, number of links.
        const ATTRIBUTES = 1 << 1;
        /// The names in a directory.
        const ENTRIES = 1 << 2;
        /// It has no name any more, or another one.
        const NAME = 1 << 3;
        /// Changes were lost: anything may have changed, of any watched file.
        const LOST = 1 << 4;
    }
}

impl Wire for ChangeSet {
    fn put(&self, out: &mut Vec<u8>) {
        self.bits().put(out);
    }

    fn take(reader: &mut Reader<'_>) -> Result<ChangeSet, DecodeError> {
        let bits = u8::take(reader)?;
        ChangeSet::from_bits(bits).map_or_else(|| refuse("change", bits.into()), Ok)
    }
}

wire_enum! {
    /// Why a filekey was revoked.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    Revocation {
        /// The client has lost the right to access the file.
        Permission = 1,
        /// The file was unlinked by another client or a local program.
        Unlinked = 2,
    }
}
