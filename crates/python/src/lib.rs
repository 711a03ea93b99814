//! The Python module `terrace._native`: a client of memory nodes and of exported directories.
//!
//! The Python files in `python/terrace` make the module `terrace` of it, with exceptions, type stubs, asyncio
//! and a file system for `fsspec`.
//!
//! | module | contains |
//! |---|---|
//! | `client`, `region` | the classes `Client` and `Region` |
//! | `memory` | the class `Memory`: registered memory of Python objects |
//! | `operation` | the class `Operation`: an access that has begun |
//! | `connection` | a client with the queue of its accesses |
//! | `access` | an access, in steps of bounded length |
//! | `arguments` | paths, times and hosts, as Python gives them |
//! | `connecting` | connecting to a server, while signals are handled |
//! | `export` | the class `Export`: a client of an exported directory |
//! | `export_file` | the class `ExportFile` |
//! | `attributes` | attributes of exported files as dictionaries |
//! | `signals` | calls of an export's client, during which signals are handled |
//! | `handle` | objects that only the process that has made them may use |
//! | `watcher` | the thread that polls for accesses with callbacks |
//! | `view` | views of Python's buffers |
//! | `failure` | errors as exceptions |
//!
//! Methods release the interpreter's lock while they wait for the network. A thread that holds a lock of Rust never acquires
//! the interpreter's: memory is released, and callbacks are called, without locks held.

#![warn(missing_docs)]

mod access;
mod arguments;
mod attributes;
mod client;
mod connecting;
mod connection;
mod export;
mod export_file;
mod failure;
mod handle;
mod memory;
mod operation;
mod region;
mod signals;
mod view;
mod watcher;

use pyo3::pymodule;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::client::{Client, connect};
    #[pymodule_export]
    use crate::export::{Export, connect_export};
    #[pymodule_export]
    use crate::export_file::ExportFile;
    #[pymodule_export]
    use crate::memory::Memory;
    #[pymodule_export]
    use crate::operation::Operation;
    #[pymodule_export]
    use crate::region::Region;
}
