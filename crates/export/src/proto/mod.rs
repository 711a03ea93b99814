//! The metadata protocol between a client and `terrace export`.
//!
//! # Setup
//! The client connects to the export's stream socket: TCP at its address and port, or on the same host an abstract Unix
//! socket, by which the server learns the client's user ([`SetupRequest`], [`SetupAnswer`]). Both ends send the numbers of their
//! queue pairs there. The socket stays open for as long as the connection, so that each end learns of the other's end.
//!
//! # Messages
//! Everything else is SENDs on the control queue pair ([`Message`]), at most [`MESSAGE_BYTES_MAX`] long, little-endian:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 1 | version: [`VERSION`] |
//! | 1 | 1 | kind: the number beside the message's name in [`Request`], [`Answer`] or [`Event`] |
//! | 2 | 2 | reserved, zero |
//! | 4 | 4 | length of the message in bytes, this header included |
//! | 8 | 8 | id: chosen by the client, repeated in the answer; 0 in events |
//!
//! and then the fields in their order. A string is a length (u16) and its bytes, an option a byte (0 or 1) and the value,
//! a list a count (u16) and its elements. A decoder accepts any bytes and returns a message or a [`DecodeError`]; it
//! allocates no more than the message is long. A decoded message encodes to the same bytes again.

mod codec;
mod message;
pub mod setup;
mod types;

pub use codec::{DecodeError, Reader, Text, Wire};
pub use message::{
    Answer, Body, CONTENT_BYTES_MAX, Event, HEADER_BYTES, MESSAGE_BYTES_MAX, Message, NAME_BYTES_MAX, Request,
};
pub use setup::{Link, QueuePairs, SETUP_BYTES_MAX, SetupAnswer, SetupRequest};
pub use types::{
    Attributes, ChangeSet, DirectoryEntry, DirectoryPage, FileId, FileKey, FileKind, FileSystem, LockKind,
    OpenAccess, Opened, RenameMode, Revocation, SetAttributes, SetTime, Timestamp,
};

/// The version of the protocol, in every message.
pub const VERSION: u8 = 4;
