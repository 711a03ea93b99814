//! Limits and quotas.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::Error;

/// Limits of a device: `ibv_query_device` returns them and creation enforces them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest region in bytes.
    pub max_mr_size: u64,
    /// Memory regions.
    pub max_mr: u32,
    /// Memory windows.
    pub max_mw: u32,
    /// Protection domains.
    pub max_pd: u32,
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests in a send or receive queue.
    pub max_qp_wr: u32,
    /// Scatter/gather elements of a work request.
    pub max_sge: u32,
    /// Bytes of inline data of a send work request.
    pub max_inline_data: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Work requests in a shared receive queue.
    pub max_srq_wr: u32,
    /// Scatter/gather elements of a work request in a shared receive queue.
    pub max_srq_sge: u32,
    /// Address handles.
    pub max_ah: u32,
    /// Multicast groups. Each takes a descriptor.
    pub max_mcast_groups: u32,
    /// Queue pairs that are attached to one multicast group.
    pub max_mcast_qp_attach: u32,
    /// READs and atomics outstanding per queue pair, in each direction.
    pub max_rd_atomic: u8,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_mr_size: u64::MAX,
            max_mr: 1 << 20,
            max_mw: 1 << 20,
            max_pd: 1 << 16,
            max_qp: 60_000,
            max_qp_wr: 1 << 15,
            max_sge: 32,
            max_inline_data: 1024,
            max_cq: 1 << 16,
            max_cqe: (1 << 22) - 1,
            max_srq: 1 << 16,
            max_srq_wr: 1 << 15,
            max_srq_sge: 32,
            max_ah: 1 << 20,
            max_mcast_groups: 128,
            max_mcast_qp_attach: 256,
            max_rd_atomic: 128,
        }
    }
}

/// How many objects of one kind exist, and how many may exist.
#[derive(Debug)]
pub(crate) struct Quota {
    used: AtomicU32,
    limit: u32,
    what: &'static str,
}

impl Quota {
    pub fn new(limit: u32, what: &'static str) -> Quota {
        Quota { used: AtomicU32::new(0), limit, what }
    }

    /// Takes one, or fails with ENOMEM.
    pub fn take(&self) -> Result<(), Error> {
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                (used < self.limit).then_some(used + 1)
            })
            .map(|_| ())
            .map_err(|_| Error::NoMemory(self.what))
    }

    pub fn give_back(&self) {
        self.used.fetch_sub(1, Ordering::Relaxed);
    }

    pub fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }
}

/// The quotas of a device.
#[derive(Debug)]
pub(crate) struct Quotas {
    pub pd: Quota,
    pub mr: Quota,
    pub mw: Quota,
    pub ah: Quota,
    pub cq: Quota,
    pub srq: Quota,
    pub qp: Quota,
    pub xrcd: Quota,
}

impl Quotas {
    pub fn new(limits: &Limits) -> Quotas {
        Quotas {
            pd: Quota::new(limits.max_pd, "protection domains"),
            mr: Quota::new(limits.max_mr, "memory regions"),
            mw: Quota::new(limits.max_mw, "memory windows"),
            ah: Quota::new(limits.max_ah, "address handles"),
            cq: Quota::new(limits.max_cq, "completion queues"),
            srq: Quota::new(limits.max_srq, "shared receive queues"),
            qp: Quota::new(limits.max_qp, "queue pairs"),
            // Each takes a protection domain of the device's as well.
            xrcd: Quota::new(limits.max_pd, "XRC domains"),
        }
    }
}
