//! The software RNIC: joins transport, memory and fabric into a device with the objects of the verbs.
//!
//! | module | holds |
//! |---|---|
//! | `device`, `open` | the device, and what belongs to all of its objects; opening it and closing it |
//! | `datapath` | packets, work requests and timers: pure, the time is passed in |
//! | `engine` | the driver: the thread that makes progress when the program does not, forks, the status socket |
//! | `qp`, `cq`, `srq`, `mr`, `pd`, `address` | the objects; completion channels are in `cq`, XRC domains in `srq` |
//! | `rc` | queue pairs of reliable connections, from creation to RTS |
//! | `peer_access` | accesses that a protocol above a queue pair makes for the peer |
//! | `buffer` | registered memory for callers without unsafe code |
//! | `xrc`, `xrc_table`, `holders` | targets of XRC domains; SRQ numbers; the holders of a target |
//! | `work_queue` | work queues in memory, which work requests may rewrite; their executor |
//! | `host` | memory and shared receives as a queue pair's transport sees them |
//! | `local` | same-host peers, reached without packets |
//! | `progress_callback`, `callback_turn` | callbacks that make progress together with the device; whose turn it is to call them |
//! | `management` | datagrams between devices, on queue pair 1 |
//! | `multicast`, `multicast_table` | delivery to multicast groups; their queue pairs |
//! | `table`, `timers`, `tx`, `tx_token` | queue pair numbers; deadlines; sending; the right to send for a queue pair |
//! | `schedule`, `ack` | the marks of a queue pair by which these and `in_flight` list it; what holds back its ACK |
//! | `in_flight`, `window`, `rate_limiter` | what a device and a queue pair may have in flight; the rate of unreliable services |
//! | `colocated`, `forwarding`, `unix_socket` | the port demultiplexer: packets for other devices of the address |
//! | `entries`, `source`, `keys` | a completion queue's entries; the sources that a queue pair accepts; its keys |
//! | `events`, `event_account`, `semaphore` | asynchronous events; their acknowledgements; descriptors to wait on |
//! | `limits`, `use_count`, `error` | limits and quotas; objects in use are not destroyed; why a verb was refused |
//! | `sync` | what is replaced in models |
//! | `model` | what a NIC knows of absent memory |
//! | `setup`, `stat`, `clock` | opening a port; statistics; time |
//! | `device_name` | the name that programs see |
//!
//! `device`, `qp`, `cq`, `srq` and `events` import each other, because a poll of a completion queue makes progress for
//! all queue pairs of the device. What they hold imports none of them, and `impl Device` blocks are beside what they
//! use.
//!
//! Objects are reference-counted, but ending them is explicit and follows the rules of libibverbs: an object that
//! others refer to is busy. [`Device`] says how a simulation drives it without threads ([`Device::step`]).

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod ack;
mod address;
mod buffer;
mod callback_turn;
mod clock;
mod colocated;
mod cq;
mod datapath;
mod device;
mod device_name;
mod engine;
mod entries;
mod error;
mod event_account;
mod events;
mod forwarding;
mod holders;
mod host;
mod in_flight;
mod keys;
mod limits;
mod local;
mod management;
mod model;
mod mr;
mod multicast;
mod multicast_table;
mod open;
mod pd;
mod peer_access;
mod progress_callback;
mod qp;
mod rate_limiter;
pub mod rc;
mod schedule;
mod semaphore;
mod setup;
mod source;
mod srq;
pub mod stat;
mod sync;
mod table;
#[cfg(test)]
mod timer_tests;
mod timers;
mod tx;
mod tx_token;
mod unix_socket;
mod use_count;
mod window;
mod work_queue;
mod xrc;
mod xrc_table;

pub use address::{AddressVector, Ah};
pub use buffer::Buffer;
pub use clock::{Clock, ManualClock, MonotonicClock};
pub use cq::{CompChannel, Cq, CqInit};
pub use device::{Device, DeviceConfig, KeyWatcher, Pd, PortAttributes, Report};
pub use device_name::DeviceName;
pub use engine::fork::{ForkPause, ParkedThreads};
pub use engine::start::LeftToEngine;
pub use error::Error;
pub use events::AsyncEvent;
pub use limits::Limits;
pub use local::{Backings, PeerGone};
pub use management::{MANAGEMENT_BYTES_MAX, ManagementHandler};
pub use model::NicModel;
pub use mr::{Mr, MrRequest, Mw, MwBind, MwKind, Paging};
pub use peer_access::{PagedKey, RetainedKey};
pub use progress_callback::ProgressCallback;
pub use qp::posting::Posting;
pub use qp::{CompletionHook, QpInit, QueuePair, SendStage};
pub use setup::{OpenError, PathChoice, PortConfig};
pub use srq::{Srq, SrqAttr, SrqInit, Xrcd};
pub use stat::{DeviceSnapshot, QpSnapshot};
pub use work_queue::{WORK_QUEUE_LEN_MAX, WorkQueueInit, WorkQueuesInit};

pub use terrace_fabric::udp::Probe;
pub use terrace_fabric::{Gid, Port};
pub use terrace_hostmem::{AtomicOp, HostRange};
pub use terrace_memory::{Absence, AccessError, AccessNeed, RegionPolicy};
pub use terrace_shm::BackedBy;
pub use terrace_transport::{
    APPEND_LEN_MAX, BindWindow, ByteSource, Datagram, Endpoint, InlineData, LocalError, Masked, Payload,
    PostError, Provided, QpAttr, QpAttrMask, QpCap, QpCounters, QpState, QpType, RETRY_CNT_INFINITE, RecvWr,
    SendFlags, SendOp, SendWr, Sge, SgeList, Target, Time, Wc, WcFlags, WcOpcode, WcStatus, wqe_format,
};
pub use terrace_wire::{Path, QPN_INSTANCE_SHIFT, port_of};
