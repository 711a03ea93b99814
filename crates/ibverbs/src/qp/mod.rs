//! Queue pairs.
//!
//! | module | verbs |
//! |---|---|
//! | `create` | create, open, destroy |
//! | `modify` | modify and query |
//! | `query_only`, `capacities` | attributes that only this crate stores; conversion of sizes |
//! | `post` | `ibv_post_send`, `ibv_post_recv` and `ibv_bind_mw` |
//! | `append` | `terrace_post_append` and `terrace_post_write_commit` |
//! | `convert` | conversion of C's work requests to the NIC's |
//! | `cross_channel` | queue pairs whose work queues are in memory |
//! | `wr`, `builder` | `ibv_wr_*`; the list of collected work requests |

mod append;
mod builder;
mod capacities;
mod convert;
pub mod create;
mod cross_channel;
mod modify;
pub mod post;
pub mod query_only;
mod wr;

use std::sync::Arc;

use terrace_nic::QueuePair;
use terrace_sync::Mutex;

use crate::abi::newer::QpEx;
use crate::abi::{ibv_qp, ibv_qp_ex};
use crate::context::Context;
use crate::extended_poll::ExtendedPoll;
use crate::object::{CPart, Object};
use crate::pd::Use;

pub use cross_channel::Base;

/// `ibv_qp_ex`, of which `ibv_qp` is the beginning. Plain queue pairs are the same object.
#[repr(C)]
pub struct QpObject {
    c: CPart<QpEx>,
    context: Arc<Context>,
    qp: Arc<QueuePair>,
    /// Limits that posting checks before it dereferences a pointer.
    limits: convert::PostLimits,
    /// The extended polls of its completion queues, of which a program may destroy the objects as soon as the NIC's queue
    /// pair is gone.
    polls: [Option<Arc<ExtendedPoll>>; 2],
    query_only: Arc<Mutex<query_only::QueryOnly>>,
    /// `None` unless created with `send_ops_flags`.
    builder: Option<builder::Builder>,
    /// The work queues, if they are in memory.
    cross_channel: Option<Box<cross_channel::CrossChannel>>,
    /// The protection domain, or the XRC domain of a target.
    _domain: Use,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for QpObject {
    type C = QpEx;
}

impl QpObject {
    /// The NIC's queue pair.
    pub fn qp(&self) -> &Arc<QueuePair> {
        &self.qp
    }

    /// C's plain structure.
    pub fn as_c(&self) -> *mut ibv_qp {
        self.c.get().cast()
    }
}

/// `ibv_qp_to_qp_ex(3)`: null unless the queue pair was created with `send_ops_flags`.
///
/// # Safety
/// `qp` is null or a queue pair.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: the caller's.
    match unsafe { crate::object::borrow::<QpObject>(qp.cast()) } {
        Ok(object) if object.builder.is_some() => qp.cast(),
        _ => std::ptr::null_mut(),
    }
}
