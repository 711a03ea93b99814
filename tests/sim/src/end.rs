//! One end of a connection: its posted work requests, their expected outcomes, and the messages due from the peer.

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_nic::{Ah, QpType, QueuePair, SendWr, WcOpcode, WcStatus};

use crate::memory::Span;
use crate::plan::EndPlan;

/// A work request that has been drawn, but not posted.
#[derive(Clone)]
pub(crate) struct Draft {
    pub wr: SendWr,
    pub intent: Intent,
    /// The memory window that the request uses.
    pub window: Option<usize>,
}

/// The intended effect of a work request on the model.
#[derive(Clone)]
pub(crate) enum Intent {
    /// A message for a receive of the peer; `None` sends the data that the READ before it fetched.
    Send {
        payload: Option<Vec<u8>>,
        imm: Option<u32>,
        invalidates: Option<u32>,
    },
    Write {
        span: Span,
        payload: Vec<u8>,
        imm: Option<u32>,
    },
    Read {
        span: Span,
        result_buffers: Vec<Span>,
    },
    CompareSwap {
        span: Span,
        compare: u64,
        swap: u64,
        result_buffers: Vec<Span>,
    },
    FetchAdd {
        span: Span,
        add: u64,
        result_buffers: Vec<Span>,
    },
    /// A fetch-and-add on the node's first or second counter, which all connections share.
    Count {
        counter: usize,
        add: u64,
        result_buffers: Vec<Span>,
    },
    AtomicWrite {
        span: Span,
        value: u64,
    },
    /// A record, with its number, for the peer's log; `None` to learn the log's end.
    Append {
        record: Option<(u64, Vec<u8>)>,
        result: Span,
    },
    /// FLUSH, or a datagram that the peer drops.
    Nothing,
    Bind {
        window: usize,
    },
    /// Invalidates a type 2 window, or unbinds one of type 1.
    Unbind {
        window: usize,
    },
    /// A request that cannot succeed. Its status, unless it is flushed.
    Mistake {
        status: WcStatus,
        message: Option<Vec<u8>>,
    },
}

/// A posted send work request.
pub(crate) struct Request {
    /// The number of this request among the end's requests of this epoch.
    pub number: u64,
    pub wr_id: u64,
    pub opcode: WcOpcode,
    pub signaled: bool,
    /// The completion's byte count, if it has one.
    pub byte_len: Option<u32>,
    pub window: Option<usize>,
    pub outcome: Outcome,
}

/// The condition that must hold when a request has completed.
pub(crate) enum Outcome {
    Nothing,
    /// The peer's memory holds the data, unless a later request has changed it.
    Stored,
    /// The buffers contain the expected data. Where later requests may write before a repetition of the READ, each byte
    /// may have any of its intermediate values.
    Fetched {
        span: Span,
        fences: u64,
        result_buffers: Vec<Span>,
        expected: Vec<u8>,
        later_writes: Vec<(usize, Vec<u8>)>,
    },
    /// The buffers contain the value before the atomic.
    Swapped {
        result_buffers: Vec<Span>,
        before: u64,
    },
    /// The buffers contain a value of a shared counter.
    Counted {
        counter: usize,
        add: u64,
        result_buffers: Vec<Span>,
    },
    /// The buffer contains the record's offset, which is not below `floor`.
    Appended {
        number: Option<u64>,
        floor: u64,
        result: Span,
    },
    Bound {
        window: usize,
    },
    Unbound {
        window: usize,
    },
    Mistaken {
        status: WcStatus,
    },
}

/// A request's effect at the peer, kept so that the model can undo a request that was not executed.
pub(crate) struct Step {
    /// Whether the request consumes a receive.
    pub consumes: bool,
    pub effect: Option<Effect>,
}

/// A change of the peer's memory.
pub(crate) struct Effect {
    pub span: Span,
    pub before: Vec<u8>,
    pub after: Vec<u8>,
}

/// A posted receive work request.
pub(crate) struct Receive {
    pub wr_id: u64,
    pub spans: Vec<Span>,
}

/// A message that the peer has sent, and that no receive has taken.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub payload: Vec<u8>,
    /// The target of a WRITE with immediate; `None` for SEND.
    pub written_to: Option<Span>,
    pub imm: Option<u32>,
    pub invalidates: Option<u32>,
    pub solicited: bool,
    /// Whether the message is longer than any receive, which must then fail.
    pub too_long: bool,
}

/// The state of a program's send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Running,
    /// The program waits for the `SqDrained` event.
    Draining,
}

pub(crate) struct End {
    pub kind: QpType,
    pub mtu: usize,
    pub plan: EndPlan,
    pub qp: Arc<QueuePair>,
    /// The address handle of the peer, for UD.
    pub ah: Option<Arc<Ah>>,
    pub qkey: u32,
    /// The part of the peer's memory that only this end writes to.
    pub target: Span,
    /// WRITEs of UC, whose arrival is not reported.
    pub uncertain: Vec<(Span, Vec<u8>)>,
    /// Whether the queue pair is ready to receive and to send.
    pub connected: bool,
    pub phase: Phase,
    /// The number of send queue drains left.
    pub drains: u32,
    /// The status with which the connection ended, if the program has seen it.
    pub broken: Option<WcStatus>,
    /// Whether a send work request has completed in error.
    pub send_failed: bool,
    /// Whether the connection failed in this epoch, before the run ended it.
    pub broke: bool,
    /// The number of send work requests that the program still has to draw.
    pub budget: u32,
    pub drafts: VecDeque<Draft>,
    /// Requests that may be outstanding.
    pub posted: VecDeque<Request>,
    /// Every request of this epoch.
    pub steps: Vec<Step>,
    /// The number of the epoch's first requests that have succeeded.
    pub succeeded: u64,
    /// The number of fenced requests.
    pub fences: u64,
    /// The data that the latest READ will fetch.
    pub last_read: Vec<u8>,
    pub receives: VecDeque<Receive>,
    /// Messages that the peer has sent to this end.
    pub inbound: VecDeque<Message>,
    /// The number of receives of this epoch that have succeeded.
    pub received: u64,
    /// The number of receives of this epoch that were flushed or failed.
    pub receives_failed: u64,
}

impl End {
    pub fn is_reliable(&self) -> bool {
        self.kind == QpType::Rc
    }

    pub fn is_open(&self) -> bool {
        self.broken.is_none()
    }

    /// Returns whether a signaled request is outstanding.
    pub fn awaits_completion(&self) -> bool {
        self.posted.iter().any(|request| request.signaled)
    }

    /// Returns whether the program still has requests to post.
    pub fn has_plans(&self) -> bool {
        self.is_open() && (self.budget > 0 || !self.drafts.is_empty())
    }

    /// Resets the state for a new epoch.
    pub fn begin_epoch(&mut self) {
        self.connected = false;
        self.phase = Phase::Running;
        self.drains = self.plan.drains;
        self.broken = None;
        self.send_failed = false;
        self.broke = false;
        self.budget = self.plan.budget;
        self.drafts.clear();
        self.posted.clear();
        self.steps.clear();
        self.succeeded = 0;
        self.fences = 0;
        self.receives.clear();
        self.inbound.clear();
        self.received = 0;
        self.receives_failed = 0;
    }
}
