//! One end of a connection: its posted work requests, their expected outcomes, and the messages due from the peer.

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_nic::{Ah, QpType, QueuePair, SendWr, WcOpcode, WcStatus};

use crate::memory::Place;
use crate::plan::EndPlan;

/// A work request that has been drawn and not yet been posted.
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
        place: Place,
        payload: Vec<u8>,
        imm: Option<u32>,
    },
    Read {
        place: Place,
        landing: Vec<Place>,
    },
    CompareSwap {
        place: Place,
        compare: u64,
        swap: u64,
        landing: Vec<Place>,
    },
    FetchAdd {
        place: Place,
        add: u64,
        landing: Vec<Place>,
    },
    /// A fetch-and-add on a counter that all connections share: the node's first or second.
    Count {
        counter: usize,
        add: u64,
        landing: Vec<Place>,
    },
    AtomicWrite {
        place: Place,
        value: u64,
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
    /// Cannot succeed: if the request is not flushed, this is its status.
    Mistake {
        status: WcStatus,
        message: Option<Vec<u8>>,
    },
}

/// A posted send work request.
pub(crate) struct Request {
    /// Counts the end's requests of this epoch.
    pub number: u64,
    pub wr_id: u64,
    pub opcode: WcOpcode,
    pub signaled: bool,
    /// The completion's byte count, where the completion has one.
    pub byte_len: Option<u32>,
    pub window: Option<usize>,
    pub outcome: Outcome,
}

/// The condition that a completed request fulfils.
pub(crate) enum Outcome {
    Nothing,
    /// The peer's memory holds the data, unless a later request has changed it.
    Stored,
    /// The expected data has landed. Where later requests may write before a repetition of the READ, each byte may have
    /// any of its intermediate values.
    Fetched {
        place: Place,
        fences: u64,
        landing: Vec<Place>,
        expected: Vec<u8>,
        racers: Vec<(usize, Vec<u8>)>,
    },
    /// The value before the atomic has landed.
    Swapped {
        landing: Vec<Place>,
        before: u64,
    },
    /// A value of a shared counter has landed.
    Counted {
        counter: usize,
        add: u64,
        landing: Vec<Place>,
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
    pub place: Place,
    pub before: Vec<u8>,
    pub after: Vec<u8>,
}

/// A posted receive work request.
pub(crate) struct Receive {
    pub wr_id: u64,
    pub places: Vec<Place>,
}

/// A message that the peer has sent and no receive has taken yet.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub payload: Vec<u8>,
    /// Where a WRITE with immediate data put its payload; `None` for SEND.
    pub written_to: Option<Place>,
    pub imm: Option<u32>,
    pub invalidates: Option<u32>,
    pub solicited: bool,
    /// Longer than any receive: the receive must fail.
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
    /// UD: the address handle of the peer.
    pub ah: Option<Arc<Ah>>,
    pub qkey: u32,
    /// The part of the peer's memory that only this end writes to.
    pub target: Place,
    /// UC: WRITEs whose arrival nothing reports.
    pub uncertain: Vec<(Place, Vec<u8>)>,
    /// Whether the queue pair is ready to receive and to send.
    pub connected: bool,
    pub phase: Phase,
    /// Drains of the send queue left.
    pub drains: u32,
    /// Why the connection is over, as far as the program knows.
    pub broken: Option<WcStatus>,
    /// Whether a send work request has completed in error.
    pub send_failed: bool,
    /// Whether the connection broke in this epoch, before it was ended on purpose.
    pub broke: bool,
    /// Send work requests that the program is still going to draw.
    pub budget: u32,
    pub drafts: VecDeque<Draft>,
    /// Requests not known to be complete.
    pub posted: VecDeque<Request>,
    /// Every request of this epoch.
    pub steps: Vec<Step>,
    /// Requests known to have succeeded; they are the first ones of the epoch.
    pub succeeded: u64,
    /// Fenced requests so far.
    pub fences: u64,
    /// The data that the latest READ will fetch.
    pub last_read: Vec<u8>,
    pub receives: VecDeque<Receive>,
    /// Messages that the peer has sent to this end.
    pub inbound: VecDeque<Message>,
    /// Receives of this epoch that have succeeded.
    pub received: u64,
    /// Receives of this epoch that were flushed or failed.
    pub receives_failed: u64,
}

impl End {
    pub fn is_reliable(&self) -> bool {
        self.kind == QpType::Rc
    }

    pub fn is_open(&self) -> bool {
        self.broken.is_none()
    }

    /// Whether a signaled request is outstanding.
    pub fn awaits_completion(&self) -> bool {
        self.posted.iter().any(|request| request.signaled)
    }

    /// Whether the program still has something to post.
    pub fn has_plans(&self) -> bool {
        self.is_open() && (self.budget > 0 || !self.drafts.is_empty())
    }

    /// Starts over after a reset.
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
