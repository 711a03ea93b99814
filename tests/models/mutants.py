#!/usr/bin/env python3
"""Plants faults into a copy of Terrace, one at a time, and shows that the loom models find each of them.

    tests/models/mutants.py [--work DIRECTORY] [PATTERN...]

A fault weakens one ordering or drops one step: a replacement of text that occurs exactly once. Takes some seconds for each.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import planting

SHM = "crates/shm/src/"
SYNC = "crates/sync/src/"
MEMORY = "crates/memory/src/"
HOSTMEM = "crates/hostmem/src/"
NIC = "crates/nic/src/"
NODE = "crates/node/src/"
# Where a model has to repeat code.
MEMORY_TESTS = "crates/memory/tests/"
NIC_TESTS = "crates/nic/tests/models/"
NODE_TESTS = "crates/node/tests/"

# A model that a fault keeps busy for so long has not found it.
LIMIT_S = 120
# The status of timeout(1), which ends the model and not only cargo.
TIMED_OUT = 124

# The model's package and target: name, file, text, its replacement.
MUTANTS = {
    ("terrace-shm", "record_model"): [
        ("record-without-release-fence", SHM + "record.rs", "    fence(Ordering::Release);\n", ""),
        ("record-without-acquire-fence", SHM + "record.rs", "    fence(Ordering::Acquire);\n", ""),
        ("record-ends-relaxed", SHM + "record.rs",
         "record[0].store(before + 2, Ordering::Release);", "record[0].store(before + 2, Ordering::Relaxed);"),
        ("record-is-read-relaxed", SHM + "record.rs",
         "let version = record[0].load(Ordering::Acquire);", "let version = record[0].load(Ordering::Relaxed);"),
        ("record-is-not-checked-again", SHM + "record.rs",
         "(record[0].load(Ordering::Relaxed) == version).then_some", "(version > 0).then_some"),
    ],
    ("terrace-shm", "reader_model"): [
        ("readers-enter-without-fence", SHM + "handshake.rs",
         "    full_fence();\n    odd.wrapping_add(1)", "    odd.wrapping_add(1)"),
        ("readers-enter-relaxed", SHM + "handshake.rs",
         "epoch.store(odd, Ordering::Release);", "epoch.store(odd, Ordering::Relaxed);"),
        ("readers-leave-relaxed", SHM + "handshake.rs",
         "epoch.store(even, Ordering::Release);", "epoch.store(even, Ordering::Relaxed);"),
        ("withdrawals-without-fence", SHM + "handshake.rs",
         "pub(crate) fn fence_after_withdrawal() {\n    full_fence();\n", "pub(crate) fn fence_after_withdrawal() {\n"),
        ("ends-are-seen-relaxed", SHM + "handshake.rs",
         "epoch.load(Ordering::Acquire) != seen", "epoch.load(Ordering::Relaxed) != seen"),
        ("epochs-are-seen-relaxed", SHM + "handshake.rs",
         "let seen = epoch.load(Ordering::SeqCst);", "let seen = epoch.load(Ordering::Relaxed);"),
        ("hazards-after-the-epoch", SHM + "reader_line.rs",
         "        self.hazard.store(hazard_of(pages), Ordering::Relaxed);\n"
         "        EpochGuard { epoch: &self.epoch, even: handshake::enter(&self.epoch), slot }",
         "        let guard = EpochGuard { epoch: &self.epoch, even: handshake::enter(&self.epoch), slot };\n"
         "        self.hazard.store(hazard_of(pages), Ordering::Relaxed);\n        guard"),
        ("domains-after-the-epoch", SHM + "reader_line.rs",
         "        self.domain.store(domain, Ordering::Relaxed);\n"
         "        self.key_slot.store(slot, Ordering::Relaxed);\n        self.hazard.store(hazard_of(pages), Ordering::Relaxed);\n"
         "        EpochGuard { epoch: &self.epoch, even: handshake::enter(&self.epoch), slot }",
         "        self.key_slot.store(slot, Ordering::Relaxed);\n        self.hazard.store(hazard_of(pages), Ordering::Relaxed);\n"
         "        let guard = EpochGuard { epoch: &self.epoch, even: handshake::enter(&self.epoch), slot };\n"
         "        self.domain.store(domain, Ordering::Relaxed);\n        guard"),
        ("new-readers-before-the-fence", SHM + "reader_list.rs",
         "        handshake::fence_after_withdrawal();\n        match self.count.load(Ordering::Relaxed) {",
         "        let count = self.count.load(Ordering::Relaxed);\n"
         "        handshake::fence_after_withdrawal();\n        match count {"),
    ],
    ("terrace-shm", "ring_model"): [
        ("batches-are-published-relaxed", SHM + "handshake.rs",
         "word.store(value, Ordering::Release);", "word.store(value, Ordering::Relaxed);"),
        ("batches-are-published-without-fence", SHM + "handshake.rs",
         "    full_fence();\n    sleep.load(Ordering::Relaxed)", "    sleep.load(Ordering::Relaxed)"),
        ("consumers-sleep-without-fence", SHM + "handshake.rs",
         "    change_sleep(sleep, 1);\n    full_fence();\n", "    change_sleep(sleep, 1);\n"),
        ("records-are-seen-relaxed", SHM + "ring/rx.rs",
         "header(&self.ring, self.head % RING_BYTES)[0].load(Ordering::Acquire)",
         "header(&self.ring, self.head % RING_BYTES)[0].load(Ordering::Relaxed)"),
        ("heads-are-published-relaxed", SHM + "ring/rx.rs",
         "self.consumer_page.quads(0, 1)[0].store(self.head, Ordering::Release);",
         "self.consumer_page.quads(0, 1)[0].store(self.head, Ordering::Relaxed);"),
        ("runs-are-given-back-unread", SHM + "ring/rx.rs",
         "            if let Some(Record { acknowledged, len }) = record {\n",
         "            self.consumer_page.quads(0, 1)[0].store(behind, Ordering::Release);\n"
         "            if let Some(Record { acknowledged, len }) = record {\n"),
        ("heads-are-seen-relaxed", SHM + "ring/tx.rs",
         "self.tx_ring.consumer_page.quads(0, 1)[0].load(Ordering::Acquire)",
         "self.tx_ring.consumer_page.quads(0, 1)[0].load(Ordering::Relaxed)"),
        ("records-without-a-0-behind", SHM + "ring/tx.rs",
         "        self.end_at(self.state.tail);\n        let at = self.start % RING_BYTES;", "        let at = self.start % RING_BYTES;"),
        ("no-space-for-the-0", SHM + "ring/tx.rs",
         "if !self.has_room(skipped + record + RECORD_ALIGNMENT) {", "if !self.has_room(skipped + record) {"),
        ("doorbells-once-for-all-sleeps", SHM + "ring/tx.rs",
         "let is_new = sleep % 2 == 1 && sleep != self.state.rung;", "let is_new = sleep % 2 == 1 && self.state.rung == 0;"),
    ],
    ("terrace-memory", "pin_model"): [
        ("pins-are-taken-relaxed", MEMORY + "pin.rs",
         "    pub(crate) fn pin(&self) -> Pinned<'_, T> {\n"
         "        // Acquire: what the last writer stored before it opened is seen.\n"
         "        if self.state.fetch_add(1, Ordering::Acquire) & CLOSED != 0 {",
         "    pub(crate) fn pin(&self) -> Pinned<'_, T> {\n"
         "        if self.state.fetch_add(1, Ordering::Relaxed) & CLOSED != 0 {"),
        ("pins-are-returned-relaxed", MEMORY + "pin.rs",
         "self.state.fetch_sub(1, Ordering::Release)", "self.state.fetch_sub(1, Ordering::Relaxed)"),
        ("pins-are-seen-relaxed", MEMORY + "pin.rs",
         "let state = self.state.load(Ordering::Acquire);\n            if state & PINS", 
         "let state = self.state.load(Ordering::Relaxed);\n            if state & PINS"),
        ("locks-are-opened-relaxed", MEMORY + "pin.rs",
         "fetch_and(!(CLOSED | WAITING), Ordering::Release)", "fetch_and(!(CLOSED | WAITING), Ordering::Relaxed)"),
        ("last-pins-wake-nobody", MEMORY + "pin.rs",
         "            // The last pin: a writer may be asleep until this.\n            wake_all(&self.state);\n", ""),
        ("openers-wake-nobody", MEMORY + "pin.rs",
         "        if before & WAITING != 0 {\n            wake_all(&self.state);\n        }\n", "        let _ = before;\n"),
        ("sleepers-are-not-announced", MEMORY + "pin.rs", "let announced = state | WAITING;", "let announced = state;"),
    ],
    ("terrace-memory", "key_slot_model"): [
        ("entries-are-peeked-at-relaxed", MEMORY + "pin.rs",
         "let is_open = self.state.load(Ordering::Acquire) & CLOSED == 0;", "let is_open = self.state.load(Ordering::Relaxed) & CLOSED == 0;"),
        ("entries-are-peeked-at-while-closed", MEMORY + "pin.rs",
         "let is_open = self.state.load(Ordering::Acquire) & CLOSED == 0;", "let is_open = self.state.load(Ordering::Acquire) < u32::MAX;"),
        ("key-slots-after-the-epoch", SHM + "reader_line.rs",
         "        self.key_slot.store(slot, Ordering::Relaxed);\n        self.hazard.store(hazard_of(pages), Ordering::Relaxed);\n"
         "        EpochGuard { epoch: &self.epoch, even: handshake::enter(&self.epoch), slot }",
         "        self.hazard.store(hazard_of(pages), Ordering::Relaxed);\n"
         "        let guard = EpochGuard { epoch: &self.epoch, even: handshake::enter(&self.epoch), slot };\n"
         "        self.key_slot.store(slot, Ordering::Relaxed);\n        guard"),
        ("own-readers-enter-without-fence", SHM + "handshake.rs",
         "    full_fence();\n    odd.wrapping_add(1)", "    odd.wrapping_add(1)"),
        ("slots-are-closed-without-waiting", MEMORY_TESTS + "key_slot_model.rs",
         "            while !self.line.has_left(seen) {\n                thread::yield_now();\n            }\n", "            let _ = seen;\n"),
        ("slots-are-waited-for-before-they-are-closed", MEMORY_TESTS + "key_slot_model.rs",
         "        entry.add(1);\n", "        drop(entry);\n        self.slots[slot].close().add(1);\n"),
    ],
    ("terrace-sync", "futex_model"): [
        ("mutexes-are-released-relaxed", SYNC + "words.rs",
         "let before = self.state.swap(FREE, Ordering::Release);", "let before = self.state.swap(FREE, Ordering::Relaxed);"),
        ("mutexes-are-taken-relaxed", SYNC + "words.rs",
         "compare_exchange(FREE, TAKEN, Ordering::Acquire,", "compare_exchange(FREE, TAKEN, Ordering::Relaxed,"),
        ("mutexes-are-taken-late-relaxed", SYNC + "words.rs",
         "compare_exchange_weak(before, raised, Ordering::Acquire,", "compare_exchange_weak(before, raised, Ordering::Relaxed,"),
        ("mutexes-forget-sleepers", SYNC + "words.rs",
         "let raised = before.max(mark);", "let raised = before.max(TAKEN);"),
        ("mutexes-wake-nobody", SYNC + "words.rs",
         "if wake(&self.state, 1) == 0 && is_reserved {", "if is_reserved {"),
        ("mutexes-stay-reserved", SYNC + "words.rs",
         "            let _ = free_to(RESERVED, FREE);\n", ""),
        ("readers-leave-a-lock-relaxed", SYNC + "words.rs",
         "self.state.fetch_sub(1, Ordering::Release) - 1", "self.state.fetch_sub(1, Ordering::Relaxed) - 1"),
        ("writers-leave-a-lock-relaxed", SYNC + "words.rs",
         "self.state.swap(0, Ordering::Release) & SLEEPERS", "self.state.swap(0, Ordering::Relaxed) & SLEEPERS"),
        ("locks-are-entered-relaxed", SYNC + "words.rs",
         "fetch_update(Ordering::Acquire, Ordering::Relaxed, acquired)", "fetch_update(Ordering::Relaxed, Ordering::Relaxed, acquired)"),
        ("locks-forget-sleepers", SYNC + "words.rs",
         "self.acquire_slow(RawRwLock::with_reader, SLEEPERS);", "self.acquire_slow(RawRwLock::with_reader, 0);"),
        ("last-readers-wake-nobody", SYNC + "words.rs",
         "        if left & HOLDERS == 0 && left & SLEEPERS != 0 {\n            self.wake_sleepers();\n        }\n", ""),
        ("writers-wake-one", SYNC + "words.rs",
         "& SLEEPERS != 0 {\n            wake(&self.state, ALL);\n        }\n    }\n\n    /// The state after a reader",
         "& SLEEPERS != 0 {\n            wake(&self.state, 1);\n        }\n    }\n\n    /// The state after a reader"),
        ("writers-enter-beside-readers", SYNC + "words.rs",
         "(state & HOLDERS == 0).then_some((state & SLEEPERS) | WRITER)",
         "(state & HOLDERS != WRITER).then_some((state & SLEEPERS) | WRITER)"),
        ("notifications-change-nothing", SYNC + "words.rs", "        self.0.fetch_add(1, Ordering::Relaxed);\n", ""),
        ("notifications-wake-nobody", SYNC + "words.rs", "        wake(&self.0, count);\n", "        let _ = count;\n"),
    ],
    ("terrace-sync", "biased_model"): [
        ("biased-threads-without-light-barrier", SYNC + "biased.rs", "                light_barrier();\n", ""),
        ("revocations-without-heavy-barrier", SYNC + "biased.rs", "        heavy_barrier();\n", ""),
        ("revocations-see-relaxed", SYNC + "biased.rs",
         "self.held[biased_to & HELD_INDEX_MASK].load(Ordering::Acquire)", "self.held[biased_to & HELD_INDEX_MASK].load(Ordering::Relaxed)"),
        ("biased-threads-release-relaxed", SYNC + "biased.rs",
         "held.store(held.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release)",
         "held.store(held.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed)"),
        ("one-flag-for-all-biased-threads", SYNC + "biased.rs", "const HELD_INDEX_MASK: usize = BIASED_THREADS - 1;", "const HELD_INDEX_MASK: usize = 0;"),
    ],
    ("terrace-sync", "backlog_model"): [
        ("backlogs-are-marked-before-they-are-locked", SYNC + "backlog.rs",
         "        let mut waiting = self.waiting.lock();\n        if waiting.len() < count_max {\n            waiting.push(one);\n"
         "            self.any.store(true, Ordering::Release);\n",
         "        self.any.store(true, Ordering::Release);\n        let mut waiting = self.waiting.lock();\n"
         "        if waiting.len() < count_max {\n            waiting.push(one);\n"),
        ("backlogs-are-not-marked", SYNC + "backlog.rs", "            self.any.store(true, Ordering::Release);\n", ""),
        ("backlogs-are-cleared-behind-the-lock", SYNC + "backlog.rs",
         "        self.any.store(false, Ordering::Release);\n        std::mem::take(&mut *waiting)",
         "        let taken = std::mem::take(&mut *waiting);\n        drop(waiting);\n"
         "        self.any.store(false, Ordering::Release);\n        taken"),
    ],
    ("terrace-node", "mailbox_model"): [
        ("ends-are-looked-at-last", NODE + "mailbox.rs",
         "        let is_closed = self.is_closed.load(Ordering::Acquire);\n        (self.answers.take(), is_closed)",
         "        (self.answers.take(), self.is_closed.load(Ordering::Acquire))"),
        ("ends-are-relaxed", NODE + "mailbox.rs",
         "self.is_closed.store(true, Ordering::Release);", "self.is_closed.store(true, Ordering::Relaxed);"),
        ("ends-are-seen-early", NODE + "mailbox.rs",
         "self.is_closed.load(Ordering::Acquire)", "self.is_closed.load(Ordering::Relaxed)"),
    ],
    ("terrace-node", "agent_model"): [
        ("jobs-are-left-to-who-has-the-state", NODE_TESTS + "agent_model.rs", "            self.turn.request();\n            return false;", "            return false;"),
    ],
    ("terrace-hostmem", "interned_model"): [
        ("values-are-found-relaxed", HOSTMEM + "interned.rs",
         "let mut last = self.last.load(Ordering::Acquire);", "let mut last = self.last.load(Ordering::Relaxed);"),
        ("values-are-added-relaxed", HOSTMEM + "interned.rs",
         "compare_exchange(last, new, Ordering::AcqRel, Ordering::Acquire)", "compare_exchange(last, new, Ordering::Relaxed, Ordering::Relaxed)"),
        ("values-that-came-meanwhile-are-cut-off", HOSTMEM + "interned.rs",
         "            unsafe { (*new).next = last };\n", "            let _ = last;\n"),
    ],
    ("terrace-nic", "models"): [
        ("users-are-counted-in-two-steps", NIC + "use_count.rs",
         "        self.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, more).map(|_| ()).map_err(|_| ended())",
         "        more(self.0.load(Ordering::Acquire)).ok_or_else(ended)?;\n        self.0.fetch_add(1, Ordering::AcqRel);\n        Ok(())"),
        ("objects-end-in-two-steps", NIC + "use_count.rs",
         "match self.0.compare_exchange(0, ENDED, Ordering::AcqRel, Ordering::Relaxed) {",
         "match self.0.compare_exchange(0, 0, Ordering::AcqRel, Ordering::Relaxed).map(|_| self.0.swap(ENDED, Ordering::AcqRel)) {"),
        ("users-of-some-stay", NIC + "use_count.rs", "all.clone().take(index).for_each(UseCount::remove)", "_ = index"),
        ("requests-are-not-looked-for-again", NIC + "callback_turn.rs",
         "            if !self.is_requested() {\n                break;\n            }\n", "            break;\n"),
        ("requests-are-cleared-by-a-store", NIC + "callback_turn.rs",
         "self.is_requested.swap(false, Ordering::SeqCst);", "self.is_requested.store(false, Ordering::SeqCst);"),
        ("requests-are-cleared-behind-the-calls", NIC + "callback_turn.rs",
         "            self.is_requested.swap(false, Ordering::SeqCst);\n            active |= call();\n",
         "            active |= call();\n            self.is_requested.swap(false, Ordering::SeqCst);\n"),
        ("turns-end-relaxed", NIC + "callback_turn.rs",
         "            self.is_taken.store(false, Ordering::SeqCst);\n            if !", "            self.is_taken.store(false, Ordering::Relaxed);\n            if !"),
        ("requests-are-seen-relaxed", NIC + "callback_turn.rs",
         "self.is_requested.load(Ordering::SeqCst)", "self.is_requested.load(Ordering::Relaxed)"),
        ("anyone-calls", NIC + "callback_turn.rs", "            if taken.is_err() {\n                break;\n            }\n", "            let _ = taken;\n"),
        ("engines-leave-the-park-at-once", NIC + "engine/pause.rs", "        while self.is_wanted() {\n            self.is_parked", "        if self.is_wanted() {\n            self.is_parked"),
        ("engines-leave-the-park-relaxed", NIC + "engine/pause.rs",
         "            self.is_parked.store(false, Ordering::SeqCst);\n        }\n", "            self.is_parked.store(false, Ordering::Relaxed);\n        }\n"),
        ("forks-begin-relaxed", NIC + "engine/pause.rs", "self.forks.fetch_add(1, Ordering::SeqCst);", "self.forks.fetch_add(1, Ordering::Relaxed);"),
        ("forks-are-seen-relaxed", NIC + "engine/pause.rs", "self.forks.load(Ordering::SeqCst) > 0", "self.forks.load(Ordering::Relaxed) > 0"),
        ("engines-are-seen-parked-relaxed", NIC + "engine/pause.rs", "self.is_parked.load(Ordering::SeqCst)", "self.is_parked.load(Ordering::Relaxed)"),
        ("tokens-without-notes", NIC + "tx_token.rs", "if state == FREE { TAKEN } else { TAKEN_LOOK_AGAIN }", "if state == FREE { TAKEN } else { state }"),
        ("notes-are-dropped", NIC + "tx_token.rs", "self.0.swap(FREE, Ordering::AcqRel) == TAKEN_LOOK_AGAIN", "self.0.swap(FREE, Ordering::AcqRel) > TAKEN_LOOK_AGAIN"),
        ("tokens-are-given-back-relaxed", NIC + "tx_token.rs", "self.0.swap(FREE, Ordering::AcqRel)", "self.0.swap(FREE, Ordering::Relaxed)"),
        ("pending-marks-stay", NIC + "tx.rs", "            schedule.is_pending.store(false, Ordering::SeqCst);\n", ""),
        ("handled-queue-pairs-are-not-woken", NIC + "tx.rs",
         "if schedule.is_woken() || !handled", "if !handled"),
        ("wakeups-are-looked-for-relaxed", NIC + "schedule.rs",
         "        self.is_woken.load(Ordering::SeqCst)\n", "        self.is_woken.load(Ordering::Relaxed)\n"),
        ("pending-marks-are-cleared-relaxed", NIC + "tx.rs",
         "schedule.is_pending.store(false, Ordering::SeqCst);", "schedule.is_pending.store(false, Ordering::Relaxed);"),
        ("pending-lists-are-marked-relaxed", NIC + "tx.rs",
         "            list.push(qp.clone());\n            self.any.store(true, Ordering::SeqCst);", "            list.push(qp.clone());\n            self.any.store(true, Ordering::Relaxed);"),
        ("pending-lists-are-looked-at-relaxed", NIC + "tx.rs", "!self.any.load(Ordering::SeqCst)", "!self.any.load(Ordering::Relaxed)"),
        ("networks-are-unblocked-relaxed", NIC + "tx.rs", "self.is_blocked.store(false, Ordering::SeqCst);", "self.is_blocked.store(false, Ordering::Relaxed);"),
        ("networks-are-looked-at-relaxed", NIC + "tx.rs", "self.is_blocked.load(Ordering::SeqCst)", "self.is_blocked.load(Ordering::Relaxed)"),
        ("retried-units-do-not-count", NIC + "tx.rs",
         "        blocked.retried_count += 1;\n        Some(unit)", "        blocked.retried_count += 1;\n        self.is_blocked.store(false, Ordering::SeqCst);\n        Some(unit)"),
        ("grants-are-not-looked-for-again", NIC_TESTS + "grants.rs",
         "            budgets.give_grants(&mut work);\n        } else {", "        } else {"),
        ("waiting-lists-are-marked-relaxed", NIC + "in_flight.rs", "budget.is_awaited.store(true, Ordering::SeqCst);", "budget.is_awaited.store(true, Ordering::Relaxed);"),
        ("waiting-lists-are-looked-at-relaxed", NIC + "in_flight.rs", "budget.is_awaited.load(Ordering::SeqCst)", "budget.is_awaited.load(Ordering::Relaxed)"),
        ("bytes-are-freed-relaxed", NIC + "in_flight.rs",
         "budget.bytes.fetch_add(now_bytes.wrapping_sub(before_bytes), Ordering::SeqCst);", "budget.bytes.fetch_add(now_bytes.wrapping_sub(before_bytes), Ordering::Relaxed);"),
        ("room-is-noted-and-forgotten", NIC + "in_flight.rs",
         "        waiting.retain(|Waiting { queue, .. }| !queue.is_empty());\n    }\n\n    /// Drops", "        waiting.retain(|Waiting { queue, .. }| !queue.is_empty());\n        self.can_grant.store(false, Ordering::SeqCst);\n    }\n\n    /// Drops"),
        ("grants-are-counted-twice", NIC + "in_flight.rs", "budget.bytes.fetch_sub(before_bytes, Ordering::SeqCst);", "let _ = before_bytes;"),
        ("grants-of-nothing", NIC + "schedule.rs", "self.granted_bytes.swap(bytes, Ordering::SeqCst)", "self.granted_bytes.load(Ordering::SeqCst)"),
        ("queue-pairs-wait-twice", NIC + "schedule.rs", "!self.waits_for_grant.swap(true, Ordering::SeqCst)", "!self.waits_for_grant.swap(true, Ordering::SeqCst) || true"),
        ("engines-fall-asleep-relaxed", NIC + "engine/announce.rs",
         "deadline.0), Ordering::SeqCst);", "deadline.0), Ordering::Relaxed);"),
        ("sleep-is-looked-at-relaxed", NIC + "engine/announce.rs", "self.sleeps_until.load(Ordering::SeqCst)", "self.sleeps_until.load(Ordering::Relaxed)"),
        ("modes-are-looked-at-relaxed", NIC + "engine/announce.rs", "self.mode.load(Ordering::SeqCst)", "self.mode.load(Ordering::Relaxed)"),
        ("timers-are-published-relaxed", NIC + "timers.rs", "self.next_ns.store(next.0, Ordering::SeqCst);", "self.next_ns.store(next.0, Ordering::Relaxed);"),
        ("engines-announce-last", NIC_TESTS + "sleeping.rs",
         "        self.announced.fall_asleep(deadline);\n        let wants_pass", "        let wants_pass"),
    ],
}


FAULTS = [(target, *fault) for (_, target), faults in MUTANTS.items() for fault in faults]
PACKAGES = {target: package for package, target in MUTANTS}


def find(work, target):
    """Whether the model fails."""
    test = ["cargo", "test", "--quiet", "--package", PACKAGES[target], "--test", target]
    planting.build(work, *test, "--no-run")
    status = planting.run(work, "timeout", str(LIMIT_S), *test).returncode
    return "found" if status not in (0, TIMED_OUT) else None


def main():
    return planting.plant_all(FAULTS, planting.parser(__doc__).parse_args(), find)


if __name__ == "__main__":
    sys.exit(main())
