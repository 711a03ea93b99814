//! The software RNIC: joins transport, memory and fabric into a device with the objects of the verbs.
//!
//! | module | holds |
//! |---|---|
//! | `device` | the device, and what belongs to all of its objects |
//! | `datapath` | packets, work requests and timers: pure, the time is passed in |
//! | `engine` | the driver: the thread that makes progress when the program does not, forks, the status socket |
//! | `qp`, `cq`, `srq`, `channel`, `mr`, `pd`, `address` | the objects |
//! | `buffer` | registered memory for callers without unsafe code |
//! | `xrc` | XRC domains, and what is in them |
//! | `host` | memory and shared receives as a queue pair's transport sees them |
//! | `local` | same-host peers, reached without packets |
//! | `progress_callback` | callbacks that make progress together with the device |
//! | `management` | datagrams between devices, on queue pair 1 |
//! | `table`, `timers`, `tx` | queue pair numbers; deadlines; sending |
//! | `in_flight`, `rate_limiter` | what a device may have in flight; the rate of unreliable services |
//! | `colocated`, `forwarding`, `unix_socket` | the port demultiplexer: packets for other devices of the address, in this process and others |
//! | `entries`, `source` | the entries of a completion queue; where a queue pair's packets may come from |
//! | `events`, `semaphore` | asynchronous events; descriptors to wait on |
//! | `limits`, `error` | limits and quotas; why a verb was refused |
//! | `setup`, `stat`, `clock` | opening a port; statistics; time |
//!
//! Objects are reference-counted, but ending them is explicit and follows the rules of libibverbs: an object that
//! others refer to is busy. [`Device`] says how a simulation drives it without threads ([`Device::step`]).

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod address;
mod buffer;
mod channel;
mod clock;
mod colocated;
mod cq;
mod datapath;
mod device;
mod engine;
mod entries;
mod error;
mod events;
mod forwarding;
mod host;
mod in_flight;
mod limits;
mod local;
mod management;
mod mr;
mod pd;
mod progress_callback;
mod qp;
mod rate_limiter;
mod semaphore;
mod setup;
mod source;
mod srq;
pub mod stat;
mod table;
mod timers;
mod tx;
mod unix_socket;
mod xrc;

pub use address::{AddressVector, Ah};
pub use buffer::Buffer;
pub use channel::CompChannel;
pub use clock::{Clock, ManualClock, MonotonicClock};
pub use cq::{Cq, CqInit};
pub use device::{Device, DeviceConfig, PortAttributes};
pub use engine::ForkPause;
pub use error::Error;
pub use events::AsyncEvent;
pub use limits::Limits;
pub use local::{Backings, PeerGone};
pub use management::{MANAGEMENT_BYTES_MAX, ManagementHandler};
pub use mr::{Mr, MrRequest, Mw, MwKind, Paging};
pub use pd::Pd;
pub use progress_callback::ProgressCallback;
pub use qp::{CompletionHook, MwBind, Posting, QpInit, QueuePair};
pub use setup::{OpenError, PathChoice, PortConfig};
pub use srq::{Srq, SrqAttr, SrqInit};
pub use stat::{DeviceSnapshot, QpSnapshot};
pub use xrc::Xrcd;

pub use terrace_fabric::udp::Probe;
pub use terrace_fabric::{Gid, Port};
pub use terrace_hostmem::{AtomicOp, HostRange};
pub use terrace_memory::{Absence, RegionPolicy};
pub use terrace_shm::BackedBy;
pub use terrace_transport::{
    BindWindow, ByteSource, Datagram, LocalError, Payload, PostError, Provided, QpAttr, QpAttrMask, QpCap,
    QpCounters, QpState, QpType, RecvWr, SendFlags, SendOp, SendWr, Sge, SgeList, Target, Time, Wc, WcFlags,
    WcOpcode, WcStatus,
};
pub use terrace_wire::{Path, QPN_SLOT_SHIFT, port_of};
