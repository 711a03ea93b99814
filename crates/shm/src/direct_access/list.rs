//! Several copies by one system call, from or to a region that the kernel copies.

use smallvec::SmallVec;
use terrace_hostmem::HostRange;

use super::{COPY_BYTES_MAX, DirectAccess, LocalMemory};
use crate::process::{self, PIECES_MAX, Piece};
use crate::source::{Direction, Source};

/// What a list copies, as far as it is known before the reader's epoch is odd.
struct List<L> {
    /// Places in the other process, and the local memory.
    pieces: SmallVec<[(u64, L); PIECES_MAX]>,
    /// The key table slot of all local memory.
    slot: Option<u32>,
    bytes: u64,
    /// The other process's memory from the first byte of all pieces to behind the last one.
    start: u64,
    end: u64,
}

impl<L: LocalMemory> List<L> {
    fn new() -> List<L> {
        List { pieces: SmallVec::new(), slot: None, bytes: 0, start: u64::MAX, end: 0 }
    }

    /// Adds a piece, if it fits: the epoch protects one key table slot, and a change of the region waits for the copy.
    fn add(&mut self, host: u64, local: L) -> bool {
        let (slot, len) = (local.slot(), local.bytes());
        if len == 0 || len > COPY_BYTES_MAX - self.bytes || !self.pieces.is_empty() && slot != self.slot {
            return false;
        }
        (self.slot, self.bytes) = (slot, self.bytes + len);
        (self.start, self.end) = (self.start.min(host), self.end.max(host.saturating_add(len)));
        self.pieces.push((host, local));
        true
    }

    /// The memory from the first byte to the last one.
    fn hull(&self) -> HostRange {
        HostRange { addr: self.start, len: self.end - self.start }
    }
}

impl DirectAccess {
    /// Copies that one [`DirectAccess::copy_list`] makes at most.
    pub const LIST_MAX: usize = PIECES_MAX;

    /// Whether the last access was to this region, and the kernel copies its bytes.
    #[inline]
    pub fn copies_by_kernel(&self, key: u32) -> bool {
        matches!(&self.last.region, Some((last, _, source)) if *last == key && matches!(**source, Source::Process))
    }

    /// Copies pieces of memory from or to the addresses beside them, one after the other, by one system call. Returns
    /// how many were copied, from the first on. The next one was refused, or does not fit into the call:
    /// [`DirectAccess::copy_piece`] copies it or says why not.
    pub fn copy_list<L: LocalMemory>(
        &mut self,
        direction: Direction,
        key: u32,
        list: impl Iterator<Item = (u64, L)>,
    ) -> usize {
        let DirectAccess { peer, reader_slot, own, own_qpn, qpn, seen, last } = self;
        let Ok(region) = peer.region(key, &mut seen.region) else { return 0 };
        let mut fitting = List::new();
        for (va, local) in list.take(PIECES_MAX) {
            if !region.locate(va, local.bytes()).is_ok_and(|host| fitting.add(host, local)) {
                break;
            }
        }
        if fitting.pieces.len() < 2 {
            return 0;
        }
        let guard = reader_slot.enter_for(fitting.slot, region.region.pd, fitting.hull());
        let connection = (*own, *own_qpn, *qpn);
        let Ok(version) = peer.check(connection, &mut seen.rights, &region, direction.needs()) else {
            return 0;
        };
        let is_current = matches!(&last.region, Some((last, known, source))
            if (*last, *known) == (key, version) && matches!(**source, Source::Process));
        if !is_current {
            return 0;
        }
        let located = fitting.pieces.iter().map_while(|&(host, local)| {
            local.locate(direction, &guard).ok().map(|local| Piece { host, local })
        });
        let located: SmallVec<[Piece; PIECES_MAX]> = located.collect();
        process::copy_pieces(direction, peer.pid, &located)
    }
}
