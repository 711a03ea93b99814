//! How a client has functions carried out by a node: by chains, or as a baseline does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_access::proto::Endpoint;
#[cfg(test)]
use terrace_nic::QueuePair;
use terrace_nic::{Cq, Device, Error, Path, Payload, Pd, SendFlags, SendOp, SendWr, Sge, Wc};

#[cfg(test)]
use super::chain::ChainClient;
use crate::messages::Outcome;
#[cfg(test)]
use crate::messages::SlabKey;
use crate::protocol::{Function, Grant};

/// What a client asks of each node.
pub(super) struct Asked<'a> {
    pub device: &'a Arc<Device>,
    pub pd: &'a Arc<Pd>,
    pub cq: &'a Arc<Cq>,
    pub name: &'a str,
    pub entries: u64,
    pub depth: u32,
}

/// What a function is called for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    /// The operation, by its key.
    pub operation: usize,
    /// Index in the node's table.
    pub index: u64,
    /// The page here: where a load goes, or what a store sends.
    pub page: Option<Sge>,
}

/// A call that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finished {
    pub function: Function,
    pub call: Call,
    pub outcome: Outcome,
}

/// A connection over which functions are called. [`Transport::begin`] and [`Transport::handle`] only prepare requests, and
/// [`Transport::post`] sends them.
pub(super) trait Transport: Send {
    /// The client's ends.
    fn endpoints(&self) -> Vec<Endpoint>;

    /// Connects the ends to the node's, of which there are as many.
    ///
    /// # Errors
    /// As the NIC; EINVAL for a grant of another scheme.
    fn connect(&mut self, peers: &[(Path, Endpoint)], grant: Grant) -> Result<(), Error>;

    /// Begins a call, or queues it until those in flight have ended.
    ///
    /// # Errors
    /// As the NIC.
    fn begin(&mut self, function: Function, call: Call, now: Instant) -> Result<(), Error>;

    /// Sends what was prepared.
    ///
    /// # Errors
    /// As the NIC.
    fn post(&mut self) -> Result<(), Error>;

    /// Whether it has this queue pair.
    fn has_qp(&self, qpn: u32) -> bool;

    /// Takes a successful completion of one of its queue pairs.
    ///
    /// # Errors
    /// What is wrong with the node's answer.
    fn handle(&mut self, wc: &Wc, now: Instant) -> Result<(), &'static str>;

    /// Takes a call that has ended.
    fn take_finished(&mut self) -> Option<Finished>;

    /// Counts the time for which nobody looked as no time of the node's.
    fn delay(&mut self, time: Duration, now: Instant);

    /// Since when the oldest request is in flight.
    fn oldest(&self) -> Option<Instant>;

    /// Takes all calls back, because the node is lost, and destroys the queue pairs.
    fn abandon(&mut self) -> Vec<Call>;

    /// The queue pair of a baseline, and the memory of its first slab.
    #[cfg(test)]
    fn first_slab(&self) -> Option<(Arc<QueuePair>, SlabKey)> {
        None
    }

    /// The end of a function's chain.
    #[cfg(test)]
    fn chain(&mut self, _function: Function) -> Option<&mut ChainClient> {
        None
    }
}

/// A work request without a cookie.
pub(super) fn request(op: SendOp, payload: Payload, flags: SendFlags) -> SendWr {
    SendWr { wr_id: 0, op, payload, flags, target: None }
}
