//! Queue pairs.
//!
//! | module | verbs |
//! |---|---|
//! | `create` | create, open, destroy |
//! | `modify` | modify and query, and the attributes that only C's side keeps |
//! | `post` | `ibv_post_send` and `ibv_post_recv` |
//! | `convert` | from C's work requests to ours |
//! | `builder` | `ibv_wr_*` |

pub mod builder;
mod convert;
pub mod create;
pub mod modify;
pub mod post;

use std::sync::Arc;

use terrace_nic::QueuePair;
use terrace_sync::Mutex;

use crate::abi::newer::QpEx;
use crate::abi::{ibv_cq, ibv_qp, ibv_qp_ex};
use crate::context::Context;
use crate::object::{CPart, Object};
use crate::pd::Use;

/// `ibv_qp_ex`, of which `ibv_qp` is the beginning. Plain queue pairs are the same object.
#[repr(C)]
pub struct QpObject {
    c: CPart<QpEx>,
    context: Arc<Context>,
    qp: Arc<QueuePair>,
    /// Limits that posting checks before it follows a pointer.
    limits: PostLimits,
    /// Null without completions: an XRC target has neither, an initiator no receives.
    send_cq: *mut ibv_cq,
    recv_cq: *mut ibv_cq,
    remembered: Arc<Mutex<modify::Remembered>>,
    /// `None` unless created with `send_ops_flags`.
    builder: Option<builder::Builder>,
    /// The protection domain, or the XRC domain of a target.
    _domain: Use,
}

// SAFETY: the pointers to completion queues are only followed while the queue pair exists, and completion queues
// outlive their queue pairs.
unsafe impl Sync for QpObject {}
// SAFETY: as above.
unsafe impl Send for QpObject {}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for QpObject {
    type C = QpEx;
}

/// The limits of a work request.
#[derive(Clone, Copy)]
pub struct PostLimits {
    /// Gather elements of a send.
    pub send_sges: u32,
    /// Scatter elements of a receive.
    pub recv_sges: u32,
    /// Bytes of inline data.
    pub inline_bytes: u32,
    /// Work requests in the send queue.
    pub sends: u32,
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
