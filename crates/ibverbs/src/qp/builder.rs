//! The work requests that are collected between `wr_start` and `wr_complete`, and the operations that each type of queue
//! pair has.

use std::cell::UnsafeCell;

use lock_api::RawMutex as _;
use terrace_nic::{Error, QpType, SendWr};
use terrace_sync::RawMutex;

use crate::abi::newer::IBV_QP_EX_WITH_FLUSH;
use crate::abi::{
    IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, IBV_QP_EX_WITH_ATOMIC_WRITE,
    IBV_QP_EX_WITH_BIND_MW, IBV_QP_EX_WITH_LOCAL_INV, IBV_QP_EX_WITH_RDMA_READ, IBV_QP_EX_WITH_RDMA_WRITE,
    IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, IBV_QP_EX_WITH_SEND, IBV_QP_EX_WITH_SEND_WITH_IMM,
    IBV_QP_EX_WITH_SEND_WITH_INV, ibv_mw,
};
use crate::errno::{EOPNOTSUPP, Result};

/// Operations of each queue pair type.
const UD_OPS: u64 = (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM) as u64;
const UC_OPS: u64 = UD_OPS
    | (IBV_QP_EX_WITH_RDMA_WRITE
        | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        | IBV_QP_EX_WITH_LOCAL_INV
        | IBV_QP_EX_WITH_BIND_MW) as u64;
const RC_OPS: u64 = UC_OPS
    | (IBV_QP_EX_WITH_SEND_WITH_INV
        | IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        | IBV_QP_EX_WITH_ATOMIC_WRITE) as u64
    | IBV_QP_EX_WITH_FLUSH;

/// The operations of an XRC initiator: those of annex A14, without those of annex A19.
const XRC_OPS: u64 = RC_OPS & !(IBV_QP_EX_WITH_ATOMIC_WRITE as u64 | IBV_QP_EX_WITH_FLUSH);

/// The state from `wr_start` to `wr_complete`.
pub struct Builder {
    /// Held from `wr_start` to `wr_complete` or `wr_abort`: one thread at a time adds work requests.
    session: RawMutex,
    allowed: u64,
    list: UnsafeCell<List>,
}

// SAFETY: only the thread that holds the session accesses `list`.
unsafe impl Sync for Builder {}

/// The collected work requests.
#[derive(Default)]
pub struct List {
    /// The work requests.
    pub wrs: Vec<SendWr>,
    /// The windows of the binds among them, and the keys that they are bound to.
    pub bound: Vec<(*mut ibv_mw, u32)>,
    /// The first error.
    pub error: Option<Error>,
}

impl Builder {
    /// A builder for the operations that the program requests.
    ///
    /// # Errors
    /// EOPNOTSUPP if the queue pair type does not support all of them.
    pub fn new(qp_type: QpType, wanted: u64) -> Result<Builder> {
        let available = match qp_type {
            QpType::Rc => RC_OPS,
            QpType::Uc => UC_OPS,
            QpType::Ud => UD_OPS,
            QpType::XrcSend => XRC_OPS,
            QpType::XrcRecv => 0,
        };
        if wanted & !available != 0 {
            return Err(EOPNOTSUPP);
        }
        Ok(Builder { session: RawMutex::INIT, allowed: wanted, list: UnsafeCell::default() })
    }

    /// Whether the program requested one of these operations.
    pub fn allows(&self, operations: u64) -> bool {
        self.allowed & operations != 0
    }

    /// Begins a session with an empty list, after the end of another thread's session.
    pub fn begin(&self) {
        self.session.lock();
        let clear = |list: &mut List| {
            list.wrs.clear();
            list.bound.clear();
            list.error = None;
        };
        // SAFETY: this thread holds the session now.
        unsafe { self.with_list(clear) };
    }

    /// Whether a thread holds the session.
    pub fn has_begun(&self) -> bool {
        self.session.is_locked()
    }

    /// Runs `work` on the list.
    ///
    /// # Safety
    /// The calling thread holds the session.
    pub unsafe fn with_list<T>(&self, work: impl FnOnce(&mut List) -> T) -> T {
        // SAFETY: the caller's; a thread is in one such call at a time.
        work(unsafe { &mut *self.list.get() })
    }

    /// Ends the session.
    ///
    /// # Safety
    /// The calling thread holds the session.
    pub unsafe fn end(&self) {
        // SAFETY: the caller's.
        unsafe { self.session.unlock() };
    }
}
