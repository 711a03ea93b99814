//! Queues of frames that share one array: each frame is in one queue at most, and costs 4 bytes.

/// In place of a frame: the end of a queue.
const NONE: u32 = u32::MAX;

/// For each frame, the next one in its queue.
#[derive(Debug)]
pub(super) struct Links(Box<[u32]>);

impl Links {
    pub(super) fn new(frame_count: usize) -> Links {
        Links(vec![NONE; frame_count].into())
    }
}

/// A queue, first in, first out.
#[derive(Debug)]
pub(super) struct List {
    head: u32,
    tail: u32,
    len: usize,
}

impl Default for List {
    fn default() -> List {
        List { head: NONE, tail: NONE, len: 0 }
    }
}

impl List {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Appends a frame that is in no queue.
    pub(super) fn push(&mut self, links: &mut Links, slot: u32) {
        links.0[slot as usize] = NONE;
        match self.tail {
            NONE => self.head = slot,
            tail => links.0[tail as usize] = slot,
        }
        self.tail = slot;
        self.len += 1;
    }

    /// Removes the first frame.
    pub(super) fn pop(&mut self, links: &mut Links) -> Option<u32> {
        let slot = self.head;
        if slot == NONE {
            return None;
        }
        self.head = links.0[slot as usize];
        if self.head == NONE {
            self.tail = NONE;
        }
        self.len -= 1;
        Some(slot)
    }
}
