//! `terrace mount`: an export as a file system of this host, by FUSE.
//!
//! ```text
//!   program ── system call ──> kernel: page cache, names, attributes
//!                                │ /dev/fuse, 8 threads
//!                                v
//!   filesystem ──> names, directories, files ── write-behind, readahead ──> Remote: the export's client
//! ```
//!
//! | module | contains |
//! |---|---|
//! | `session` | mounting, unmounting, the housekeeping thread |
//! | `filesystem` | the kernel's requests |
//! | `mount` | the tables of a mount; invalidation |
//! | `names`, `directories`, `files` | what requests do |
//! | `new_directory` | names that a directory cannot have yet |
//! | `inodes`, `handles` | numbers for files, and for open files |
//! | `turns` | which thread reads the kernel's next request |
//! | `extents`, `write_behind`, `readahead`, `workers` | bytes on their way, and the threads that carry them |
//! | `locks` | locks of files, and the programs that wait for them |
//! | `repeat` | requests whose answer was lost |
//! | `attributes` | attributes, times and errors as the kernel has them |
//! | `remote` | what a mount needs of an export |
//!
//! # Consistency
//! Close-to-open: `close` and `fsync` return when the server has every byte, or with the error. `open` asks the server for the
//! file's version, and the kernel keeps its pages only if the version is the one that they were read at.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod attributes;
mod directories;
mod extents;
#[cfg(test)]
mod fake;
mod files;
mod filesystem;
mod handles;
mod inodes;
mod locks;
mod mount;
mod names;
mod new_directory;
mod readahead;
mod remote;
mod repeat;
mod session;
mod turns;
mod workers;
mod write_behind;

pub use remote::{Remote, RemoteOpen};
pub use session::{MountConfig, Mounted, mount};
