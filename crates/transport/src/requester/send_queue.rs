//! The send queue: a ring of posted work requests. It knows what is posted, what is executed and what is complete, but not
//! how an entry is executed: the [`Requester`](super::Requester) executes the next entry and retires complete ones.
//!
//! Entries have indexes that count from the queue's beginning and wrap at 2^32:
//!
//! ```text
//!   consumer              next                producer
//!   |---- executed -------|---- to execute ---|---- not posted yet ---->
//! ```
//!
//! Going back after a loss moves `next` back to `consumer`: the executor then executes entries again.

use std::collections::VecDeque;

use super::wqe::Wqe;

#[derive(Debug)]
pub(crate) struct SendQueue {
    /// The entries from `consumer` up to the producer index.
    entries: VecDeque<Wqe>,
    /// Index of the oldest entry: all before it are complete.
    consumer: u32,
    /// Index of the entry to execute next.
    next: u32,
}

impl SendQueue {
    pub(crate) fn new() -> SendQueue {
        SendQueue { entries: VecDeque::new(), consumer: 0, next: 0 }
    }

    /// Posted entries that are not complete.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Entries from `consumer` to `next`.
    #[inline(always)]
    fn executed_len(&self) -> usize {
        self.next.wrapping_sub(self.consumer) as usize
    }

    /// Entries still to execute.
    #[inline(always)]
    pub(crate) fn to_execute_len(&self) -> usize {
        self.len() - self.executed_len()
    }

    /// Whether the entry to execute next is the oldest.
    pub(crate) fn is_next_oldest(&self) -> bool {
        self.next == self.consumer
    }

    /// Posts an entry. The caller has checked that the queue is not full.
    #[inline]
    pub(crate) fn post(&mut self, wqe: Wqe) {
        self.entries.push_back(wqe);
    }

    /// The entry to execute next.
    #[inline]
    pub(crate) fn next(&self) -> Option<&Wqe> {
        self.entries.get(self.executed_len())
    }

    /// The entry before it, if that is not complete.
    pub(crate) fn previous(&self) -> Option<&Wqe> {
        self.entries.get(self.executed_len().checked_sub(1)?)
    }

    /// The same for an executor that has found one; without one this is a bug.
    #[inline]
    pub(crate) fn current(&self) -> &Wqe {
        &self.entries[self.executed_len()]
    }

    /// The same, to be changed.
    #[inline]
    pub(crate) fn current_mut(&mut self) -> &mut Wqe {
        let index = self.executed_len();
        &mut self.entries[index]
    }

    /// Notes that the current entry is executed.
    #[inline(always)]
    pub(crate) fn step(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    /// Goes back to the oldest entry.
    #[inline]
    pub(crate) fn go_back(&mut self) {
        self.next = self.consumer;
    }

    /// Goes to the entry behind the oldest `count`.
    pub(crate) fn go_behind(&mut self, count: usize) {
        self.next = self.consumer.wrapping_add(count as u32);
    }

    /// The oldest entry.
    #[inline]
    pub(crate) fn front(&self) -> Option<&Wqe> {
        self.entries.front()
    }

    /// All entries, oldest first.
    #[inline]
    pub(crate) fn iter(&self) -> std::collections::vec_deque::Iter<'_, Wqe> {
        self.entries.iter()
    }

    /// Whether the newest entry, or the one to execute next, has failed: nothing behind it will be executed.
    pub(crate) fn is_failing(&self) -> bool {
        [self.next(), self.entries.back()].into_iter().flatten().any(|wqe| wqe.failed.is_some())
    }

    /// Takes the oldest entry, complete or not.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Wqe> {
        let wqe = self.entries.pop_front()?;
        if self.next == self.consumer {
            self.step();
        }
        self.consumer = self.consumer.wrapping_add(1);
        Some(wqe)
    }

    /// Retires the oldest `count` entries, all of which are executed.
    #[inline]
    pub(crate) fn retire(&mut self, count: usize) {
        debug_assert!(count <= self.executed_len(), "entries that are not executed are not complete");
        self.entries.drain(..count);
        self.consumer = self.consumer.wrapping_add(count as u32);
    }

    /// Retires all entries, all of which are executed.
    #[inline]
    pub(crate) fn retire_all(&mut self) {
        self.entries.clear();
        self.consumer = self.next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{InlineData, Payload, SendFlags, SendOp, SendWr};

    fn entry(wr_id: u64) -> Wqe {
        let payload = Payload::Inline(InlineData::new());
        Wqe::new(SendWr { wr_id, op: SendOp::Send, payload, flags: SendFlags::empty(), target: None }, 1024)
    }

    fn next_id(queue: &SendQueue) -> Option<u64> {
        queue.next().map(|wqe| wqe.wr.wr_id)
    }

    #[test]
    fn indexes_wrap() {
        let mut queue = SendQueue { consumer: u32::MAX - 1, next: u32::MAX - 1, ..SendQueue::new() };
        (0..4).for_each(|wr_id| queue.post(entry(wr_id)));
        (0..3).for_each(|_| queue.step());
        assert_eq!((queue.len(), queue.to_execute_len(), next_id(&queue)), (4, 1, Some(3)));
        assert_eq!(queue.pop().map(|wqe| wqe.wr.wr_id), Some(0));
        assert_eq!(next_id(&queue), Some(3));
        queue.go_back();
        assert_eq!((queue.to_execute_len(), next_id(&queue)), (3, Some(1)));
        queue.go_behind(2);
        queue.retire(2);
        assert!(queue.is_next_oldest());
        queue.step();
        queue.retire_all();
        assert_eq!((queue.len(), queue.to_execute_len(), next_id(&queue)), (0, 0, None));
    }

    #[test]
    fn an_entry_that_is_taken_before_it_is_executed_is_not_executed() {
        let mut queue = SendQueue::new();
        (0..2).for_each(|wr_id| queue.post(entry(wr_id)));
        queue.pop();
        assert_eq!((queue.to_execute_len(), next_id(&queue)), (1, Some(1)));
    }
}
