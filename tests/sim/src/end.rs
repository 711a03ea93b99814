//! One end of a connection: what its program has posted, what it expects to come of it, and what it expects of the
//! peer.

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
    /// The memory window that it goes through.
    pub window: Option<usize>,
}

/// What a work request shall bring about, in terms of the model.
#[derive(Clone)]
pub(crate) enum Intent {
    /// A message for a receive of the peer; `None` sends on what the READ before it has brought.
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
    /// On a counter that all connections share: the node's first or second.
    Count {
        counter: usize,
        add: u64,
        landing: Vec<Place>,
    },
    AtomicWrite {
        place: Place,
        value: u64,
    },
    /// FLUSH, or a datagram that nobody takes.
    Nothing,
    Bind {
        window: usize,
    },
    /// Invalidates a type 2 window, or unbinds one of type 1.
    Unbind {
        window: usize,
    },
    /// Cannot succeed: this is the status that it must get if it gets as far as being looked at.
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
    /// What the completion must say, where it says something.
    pub byte_len: Option<u32>,
    pub window: Option<usize>,
    pub outcome: Outcome,
}

/// What must be true once a request has completed.
pub(crate) enum Outcome {
    Nothing,
    /// The peer's memory holds this, unless something later has changed it.
    Stored,
    /// This has landed. Bytes that requests posted later may change before a repetition of the READ are allowed to
    /// have any of the values that they went through.
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

/// What a request does at the peer, kept to be taken back from the model if it turns out not to have happened.
pub(crate) struct Step {
    /// Whether it uses up a receive.
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

/// What a peer has sent and a receive has yet to take.
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

/// What a program is doing with its send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Running,
    /// Waits for the event that says that the send queue is drained.
    Draining,
}

pub(crate) struct End {
    pub kind: QpType,
    pub mtu: usize,
    pub plan: EndPlan,
    pub qp: Arc<QueuePair>,
    /// UD: the way to the peer, and both ends' Q_Key.
    pub ah: Option<Arc<Ah>>,
    pub qkey: u32,
    /// The part of the peer's memory that belongs to this end.
    pub target: Place,
    /// UC: writes whose arrival nobody is told of.
    pub uncertain: Vec<(Place, Vec<u8>)>,
    /// Whether the queue pair is ready to receive and to send.
    pub connected: bool,
    pub phase: Phase,
    /// Drains of the send queue yet to come.
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
    /// What is not known to be complete.
    pub posted: VecDeque<Request>,
    /// Every request of this epoch.
    pub steps: Vec<Step>,
    /// Requests that are known to have succeeded; they are the first ones.
    pub succeeded: u64,
    /// Fenced requests so far.
    pub fences: u64,
    /// What the latest READ will bring.
    pub last_read: Vec<u8>,
    pub receives: VecDeque<Receive>,
    /// What the peer has sent to this end.
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

    /// Whether the program waits for a completion that will come.
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
