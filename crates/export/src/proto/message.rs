//! The messages on the control queue pair.

use terrace_node::Endpoint;

use super::VERSION;
use super::codec::{DecodeError, Reader, Text, Wire, refuse, wire_messages};
use super::setup::Link;
use super::types::{
    Attributes, ChangeSet, DirectoryPage, FileId, FileSystem, LockKind, OpenAccess, Opened, RenameMode,
    Revocation, SetAttributes,
};

/// Most bytes of a message: those of a receive buffer.
pub const MESSAGE_BYTES_MAX: usize = terrace_node::MESSAGE_BYTES_MAX;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 16;
/// Most bytes of a file that a message carries.
pub const CONTENT_BYTES_MAX: usize = 8 << 10;
/// Most bytes of a name (`NAME_MAX`).
pub const NAME_BYTES_MAX: usize = 255;

/// The kinds of answers begin here, and those of events at [`EVENTS`].
const ANSWERS: u8 = 0x80;
const EVENTS: u8 = 0xc0;

wire_messages! {
    /// A request of a client. Names are single components: not empty, not `.` or `..`, without `/`. With `only` the name has to
    /// be that file's, else the request fails with `ESTALE`: a client repeats a request so whose answer was lost.
    #[derive(Clone, Debug, PartialEq, Eq)]
    Request {
        /// The file of a name in a directory: `Attributes`. Symbolic links are not followed.
        1 Lookup { parent: FileId, name: Text, },
        /// The file of a path relative to the export, symbolic links followed within it: `Attributes`.
        2 LookupPath { path: Text, },
        /// Makes a file known to this connection that an earlier one, or this one some time ago, has looked up: the file of
        /// this path, if it is this one. `Attributes`.
        3 Reclaim { id: FileId, path: Text, },
        /// `Attributes`.
        4 GetAttributes { id: FileId, },
        /// `Attributes`.
        5 SetAttributes { id: FileId, set: SetAttributes, },
        /// `Done` if the client may access the file so: bits of `access(2)`.
        6 CheckAccess { id: FileId, mode: u8, },
        /// Opens a regular file: `Opened`, with the file's bytes if it is open for reading and has no more than `content_max`.
        7 Open { id: FileId, access: OpenAccess, content_max: u16, },
        /// Makes a regular file and opens it: `Opened`. A file of that name is opened, too. With `exclusive`, a number that the client
        /// chooses for this request, it is an error, unless this request has made it: then its answer was lost.
        8 Create { parent: FileId, name: Text, mode: u32, access: OpenAccess, exclusive: Option<u64>, },
        /// Closes an open file and revokes its key: `Done`.
        9 Close { open: u64, },
        /// `Attributes` of the new directory.
        10 MakeDirectory { parent: FileId, name: Text, mode: u32, },
        /// `Done`.
        11 Unlink { parent: FileId, name: Text, only: Option<FileId>, },
        /// `Done`.
        12 RemoveDirectory { parent: FileId, name: Text, only: Option<FileId>, },
        /// `Done`.
        13 Rename {
            parent: FileId, name: Text, new_parent: FileId, new_name: Text, mode: RenameMode, only: Option<FileId>,
        },
        /// A further name of a file: `Attributes`.
        14 Link { id: FileId, parent: FileId, name: Text, },
        /// `Attributes` of the new symbolic link.
        15 Symlink { parent: FileId, name: Text, target: Text, },
        /// `Text`.
        16 ReadLink { id: FileId, },
        /// Makes a FIFO: `Attributes`.
        17 MakeFifo { parent: FileId, name: Text, mode: u32, },
        /// Names of a directory from a cookie on, 0 at first: `Directory`.
        18 ReadDirectory { id: FileId, cookie: u64, attributes: bool, },
        /// `FileSystem`.
        19 GetFileSystem { id: FileId, },
        /// Sets the length of an open file: `Attributes`.
        20 Truncate { open: u64, len: u64, },
        /// Makes an open file at least so long: `Attributes`.
        21 Grow { open: u64, len: u64, },
        /// Gives the blocks of a range back, which reads as zeros then: `Attributes`.
        22 Punch { open: u64, offset: u64, len: u64, },
        /// Makes a file persistent, with its attributes; or a directory with its names. `Done`.
        23 Sync { id: FileId, },
        /// Locks or unlocks a file for an owner that the client chooses: `Done`, or the error `EWOULDBLOCK`.
        24 Lock { id: FileId, owner: u64, kind: LockKind, },
        /// Asks for [`Event::Changed`] of a file, or no longer: `Done`.
        25 Watch { id: FileId, on: bool, },
        /// Keeps the lease, and does nothing else: `Done`.
        26 Renew {},
        /// Replaces a queue pair for one-sided accesses that has failed: `Paired`.
        27 Pair { link: Link, endpoint: Endpoint, },
        /// `Attributes` of an open file, also if it has no name any more.
        28 GetOpenAttributes { open: u64, },
        /// Locks a file again that the client had locked on an earlier connection to the server `instance`
        /// ([`SetupAnswer::instance`](super::SetupAnswer)): `Done`, or the error `ENOLCK` if another client may have had the lock.
        29 ReclaimLock { id: FileId, owner: u64, kind: LockKind, instance: u64, },
        /// Writes bytes into an open file, beyond its end too, and notes the time: `Attributes`. One request does for short files
        /// what takes two and a one-sided access otherwise.
        30 Write { open: u64, offset: u64, data: Text, },
        /// The first range of an open file with data from an offset on: `Data`.
        31 FindData { open: u64, offset: u64, },
    }
}

wire_messages! {
    /// An answer of the server, with the id of the request.
    #[derive(Clone, Debug, PartialEq, Eq)]
    Answer {
        /// Done.
        0x80 Done {},
        /// Not done: a Linux error number, or [`UNKNOWN_FILE`](crate::UNKNOWN_FILE), [`UNKNOWN_OPEN`](crate::UNKNOWN_OPEN).
        0x81 Failed { errno: u16, },
        /// Attributes.
        0x82 Attributes { attributes: Attributes, },
        /// An open file. All of its bytes, as they were after its version was read, if they were asked for and are few.
        0x83 Opened { opened: Opened, content: Option<Text>, },
        /// The target of a symbolic link.
        0x84 Text { text: Text, },
        /// A part of a directory.
        0x85 Directory { page: DirectoryPage, },
        /// A file system.
        0x86 FileSystem { file_system: FileSystem, },
        /// The server's end of a queue pair.
        0x87 Paired { endpoint: Endpoint, },
        /// A range of a file that has data, and may have zeros in it. Empty if only a hole is left.
        0x88 Data { start: u64, end: u64, },
    }
}

wire_messages! {
    /// What the server announces.
    #[derive(Clone, Debug, PartialEq, Eq)]
    Event {
        /// A watched file has changed.
        0xc0 Changed { id: FileId, change: ChangeSet, },
        /// A filekey has been revoked; accesses fail from now on.
        0xc1 Revoked { open: u64, reason: Revocation, },
    }
}

impl Request {
    /// The files that it names.
    pub fn files(&self) -> [Option<FileId>; 2] {
        match *self {
            Request::Lookup { parent, .. }
            | Request::Create { parent, .. }
            | Request::MakeDirectory { parent, .. }
            | Request::Unlink { parent, .. }
            | Request::RemoveDirectory { parent, .. }
            | Request::Symlink { parent, .. }
            | Request::MakeFifo { parent, .. } => [Some(parent), None],
            Request::Rename { parent, new_parent, .. } => [Some(parent), Some(new_parent)],
            Request::Link { id, parent, .. } => [Some(id), Some(parent)],
            Request::GetAttributes { id }
            | Request::SetAttributes { id, .. }
            | Request::CheckAccess { id, .. }
            | Request::Open { id, .. }
            | Request::ReadLink { id }
            | Request::ReadDirectory { id, .. }
            | Request::GetFileSystem { id }
            | Request::Sync { id }
            | Request::Lock { id, .. }
            | Request::ReclaimLock { id, .. }
            | Request::Watch { id, .. } => [Some(id), None],
            Request::LookupPath { .. }
            | Request::Reclaim { .. }
            | Request::Close { .. }
            | Request::Truncate { .. }
            | Request::Grow { .. }
            | Request::Punch { .. }
            | Request::Renew {}
            | Request::Write { .. }
            | Request::Pair { .. }
            | Request::GetOpenAttributes { .. }
            | Request::FindData { .. } => [None, None],
        }
    }
}

/// The body of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// From a client.
    Request(Request),
    /// From the server, to a request.
    Answer(Answer),
    /// From the server.
    Event(Event),
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Chosen by the client, repeated in the answer; 0 in events.
    pub id: u64,
    /// What it says.
    pub body: Body,
}

impl Message {
    /// The message's bytes; `None` if they are more than [`MESSAGE_BYTES_MAX`].
    pub fn encode(&self) -> Option<Vec<u8>> {
        let kind = match &self.body {
            Body::Request(request) => request.kind(),
            Body::Answer(answer) => answer.kind(),
            Body::Event(event) => event.kind(),
        };
        let mut out = vec![VERSION, kind, 0, 0, 0, 0, 0, 0];
        self.id.put(&mut out);
        match &self.body {
            Body::Request(request) => request.put(&mut out),
            Body::Answer(answer) => answer.put(&mut out),
            Body::Event(event) => event.put(&mut out),
        }
        let len = out.len();
        out[4..8].copy_from_slice(&(len as u32).to_le_bytes());
        (len <= MESSAGE_BYTES_MAX).then_some(out)
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// If the bytes are not a message.
    pub fn decode(bytes: &[u8]) -> Result<Message, DecodeError> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(DecodeError::TooLong(bytes.len() - MESSAGE_BYTES_MAX));
        }
        let mut reader = Reader::new(bytes);
        let version = u8::take(&mut reader)?;
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let kind = u8::take(&mut reader)?;
        reader.zeros(2)?;
        let len = u32::take(&mut reader)?;
        if usize::try_from(len) != Ok(bytes.len()) {
            return refuse("length", len.into());
        }
        let id = u64::take(&mut reader)?;
        let body = match kind {
            ..ANSWERS => Request::take(kind, &mut reader)?.map(Body::Request),
            ANSWERS..EVENTS => Answer::take(kind, &mut reader)?.map(Body::Answer),
            EVENTS.. => Event::take(kind, &mut reader)?.map(Body::Event),
        };
        let body = body.ok_or(DecodeError::Kind(kind))?;
        if matches!(body, Body::Event(_)) && id != 0 {
            return refuse("id of an event", id);
        }
        reader.end()?;
        Ok(Message { id, body })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lookup(name: &[u8]) -> Message {
        let parent = FileId { dev: 1, ino: 2, generation: 3 };
        Message { id: 7, body: Body::Request(Request::Lookup { parent, name: Text::from(name) }) }
    }

    #[test]
    fn messages_end_where_they_say() {
        let bytes = lookup(b"name").encode().unwrap();
        assert_eq!(Message::decode(&bytes), Ok(lookup(b"name")));
        for len in 0..bytes.len() {
            assert!(Message::decode(&bytes[..len]).is_err());
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(Message::decode(&longer).is_err());
        let mut newer = bytes;
        newer[0] = VERSION + 1;
        assert_eq!(Message::decode(&newer), Err(DecodeError::Version(VERSION + 1)));
    }

    #[test]
    fn long_messages_are_not_sent() {
        assert!(lookup(&[b'a'; MESSAGE_BYTES_MAX]).encode().is_none());
        assert!(lookup(&[b'a'; 70_000]).encode().is_none());
        assert!(Message::decode(&vec![VERSION; MESSAGE_BYTES_MAX + 1]).is_err());
    }

    /// Bytes of a header, so that random bodies are decoded.
    fn with_header(kind: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![VERSION, kind, 0, 0];
        bytes.extend(((HEADER_BYTES + body.len()) as u32).to_le_bytes());
        bytes.extend([0; 8]);
        bytes.extend(body);
        bytes
    }

    proptest! {
        #[test]
        fn what_decodes_encodes_to_the_same_bytes(
            kind in any::<u8>(),
            body in proptest::collection::vec(0..3_u8, 0..300),
        ) {
            let bytes = with_header(kind, &body);
            if let Ok(message) = Message::decode(&bytes) {
                prop_assert_eq!(message.encode(), Some(bytes));
            }
        }
    }
}
