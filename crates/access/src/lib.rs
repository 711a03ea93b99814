//! Optimistic one-sided access to regions that need not be in memory.
//!
//! A client READs such a region as if it were all in memory. The server's NIC answers for absent pages with the
//! region's signature page ([`pattern`]), at once and without asking the server's software; the client recognizes it,
//! and fetches exactly those pages by a remote procedure call. No IO, no clock, no sockets, no files: the owner of the
//! queue pairs moves the messages, the completions and the time.
//!
//! | module | holds |
//! |---|---|
//! | [`session`] | the state of one queue pair: what to post, to call for and to complete, and in which order |
//! | [`proto`] | the messages between client and server, with their decoders |
//! | [`pattern`] | the signature page |
//! | [`region`] | the client's state of an extended region: [`layout`], signature page, [`bitmap`], [`counts`] |
//! | [`peers`] | the knowledge of rkeys, and when to ask |
//! | [`pages`] | sets of pages |

#![forbid(unsafe_code)]

pub mod bitmap;
pub mod counts;
pub mod layout;
pub mod pages;
pub mod pattern;
pub mod peers;
pub mod proto;
pub mod region;
pub mod session;
