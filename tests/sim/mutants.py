#!/usr/bin/env python3
"""Mutation test: inserts faults into a copy of Terrace, one at a time, and checks that the simulation detects each of them, or a packet script.

    tests/sim/mutants.py [--seeds N] [--work DIRECTORY] [PATTERN...]

A fault replaces a text that occurs exactly once. Each takes half a minute, most of it to compile.
"""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import planting

RESPONDER = "crates/transport/src/responder/"
REQUESTER = "crates/transport/src/requester/"
OPTIMISTIC = "crates/access/src/optimistic/"

# Name, file, text, its replacement.
MUTANTS = [
    # The requirements of the simulation name these faults.
    ("duplicates-are-executed-again", RESPONDER + "mod.rs",
     "        if distance < 0 {\n", "        if distance < 0 && packet.payload.is_empty() {\n"),
    ("atomics-are-replayed-by-executing-them", RESPONDER + "duplicates.rs",
     "            operation => self.repeat_result(call, last, operation),",
     "            operation => {\n"
     "                if let Some(atomic) = packet.ext.atomic {\n"
     "                    let op = crate::host::AtomicOp::FetchAdd { add: atomic.swap_or_add };\n"
     "                    let _ = call.host.remote_atomic(atomic.rkey, atomic.va, op);\n"
     "                }\n"
     "                self.repeat_result(call, last, operation)\n"
     "            }"),
    ("records-are-appended-again", RESPONDER + "duplicates.rs",
     "            operation => self.repeat_result(call, last, operation),",
     "            operation => {\n"
     "                if let (Some(append), Data::Bytes(record)) = (packet.ext.append, data) {\n"
     "                    let _ = call.host.append(append.rkey, record, false);\n"
     "                }\n"
     "                self.repeat_result(call, last, operation)\n"
     "            }"),
    ("refused-packets-of-records-are-kept", RESPONDER + "append.rs", "            record.bytes.truncate(start);\n", ""),
    ("losses-are-not-retransmitted", REQUESTER + "mod.rs",
     "        self.retries_left = self.retries_left.saturating_sub(1);\n        self.retransmit(now, call);\n",
     "        self.retries_left = self.retries_left.saturating_sub(1);\n        self.restart_ack_timer(now, call);\n"),
    # The responder.
    ("gaps-are-not-detected", RESPONDER + "mod.rs", "        if distance > 0 {\n", "        if distance > 1 {\n"),
    ("naks-are-repeated-for-every-packet", RESPONDER + "mod.rs", "if !self.nak_out {", "if true {"),
    ("acks-cover-one-packet-too-many", RESPONDER + "mod.rs",
     "self.queue_ack(self.expected.minus(1));", "self.queue_ack(self.expected);"),
    ("immediate-data-is-lost", RESPONDER + "mod.rs",
     "(packet.ext.imm.unwrap_or(0), WcFlags::WITH_IMM)", "(0, WcFlags::WITH_IMM)"),
    ("receives-of-failed-writes-are-lost", RESPONDER + "mod.rs",
     "            receive.into_iter().for_each(|receive| self.give_back(call, receive));\n", ""),
    ("solicited-is-forgotten", RESPONDER + "mod.rs", "        solicited: packet.bth.solicited,", "        solicited: false,"),
    ("too-few-responder-resources", RESPONDER + "one_sided.rs",
     "usize::from(common.attr.max_dest_rd_atomic.max(1))", "1"),
    ("unreliable-messages-may-have-gaps", RESPONDER + "unreliable.rs",
     "let in_sequence = packet.bth.psn == self.expected;", "let in_sequence = true;"),
    ("flushed-receives-are-forgotten", RESPONDER + "mod.rs",
     "        while let Some(receive) = self.receives.pop_front() {\n            call.fail_receive",
     "        while let Some(receive) = self.receives.pop_front().filter(|_| self.receives.len() != 1) {\n"
     "            call.fail_receive"),
    # The requester.
    ("acks-complete-reads", REQUESTER + "answers.rs",
     "self.advance(now, common, unanswered.unwrap_or(end));", "self.advance(now, common, end);"),
    ("gaps-in-responses-are-ignored", REQUESTER + "answers.rs",
     "if response_lost || sequence != self.acknowledged {", "if response_lost {"),
    ("read-data-is-written-at-a-wrong-address", REQUESTER + "answers.rs",
     "let read = (sequence - wqe.first) * common.mtu();", "let read = (sequence - wqe.first).min(2) * common.mtu();"),
    ("fences-are-ignored", REQUESTER + "emit.rs",
     "const WAITS: SendFlags = SendFlags::FENCE.union(SendFlags::ORDER_BEFORE);", "const WAITS: SendFlags = SendFlags::ORDER_BEFORE;"),
    ("rnr-waits-for-ever", REQUESTER + "answers.rs",
     "self.paused_until = Some(now.after_ns(rnr_timer_ns(timer)));", "self.paused_until = Some(now.after_ns(u64::MAX));"),
    ("read-boundaries-are-ignored", REQUESTER + "emit.rs",
     "let left = next_boundary.map_or(left, |boundary| left.min(boundary - from));", "let _ = next_boundary;"),
    ("too-many-reads-are-outstanding", REQUESTER + "emit.rs",
     "self.responses_due.len() >= usize::from(common.attr.max_rd_atomic)",
     "self.responses_due.len() > usize::from(common.attr.max_rd_atomic) + 5"),
    ("unsignaled-requests-complete", REQUESTER + "mod.rs",
     "if common.config.sq_sig_all || wr.flags.contains(SendFlags::SIGNALED) {",
     "if common.config.sq_sig_all || wr.flags.contains(SendFlags::SIGNALED) || wr.payload.len() == 8 {"),
    ("binds-are-repeated", REQUESTER + "emit.rs", "        if wqe.executed {\n",
     "        if std::mem::take(&mut wqe.executed) && false {\n"),
    ("numbers-do-not-wrap", "crates/wire/src/psn.rs",
     "(self.0.wrapping_sub(earlier.0) << 8) as i32 >> 8", "self.0 as i32 - earlier.0 as i32"),
    # The NIC, the fabric, memory.
    ("timers-are-armed-once", "crates/nic/src/timers.rs",
     "entry.schedule().timer_at.store(NEVER.0, Ordering::Relaxed);", ""),
    ("blocked-packets-stay-blocked", "crates/nic/src/datapath/send.rs",
     "        while self.tx.is_blocked() {", "        while false && self.tx.is_blocked() {"),
    ("solicited-events-come-for-all-completions", "crates/nic/src/cq/mod.rs",
     "Armed::Solicited => wc.solicited || wc.status != WcStatus::Success,", "Armed::Solicited => true,"),
    ("shared-limits-are-reached-late", "crates/nic/src/srq.rs",
     "let reached = queue.waiting.len() < queue.attr.limit as usize;", "let reached = queue.waiting.len() + 1 < queue.attr.limit as usize;"),
    ("icrc-is-not-checked", "crates/fabric/src/rx.rs",
     "if !too_short && let Verdict::Good { ip_id }", "if !too_short { return Some(0); }\n    if let Verdict::Good { ip_id }"),
    ("windows-stay-open", "crates/memory/src/window.rs",
     "cancel_changes(&entry);\n        }\n        self.unbind(&mut entry);", "cancel_changes(&entry);\n        }\n        entry.bound = true;"),
    ("fetch-and-add-adds-one-more", "crates/hostmem/src/fault/mod.rs",
     "fetch_add(addr, add),", "fetch_add(addr, add | 1),"),
]


# Faults of the NP-RDMA protocol, for the simulation with --np.
NP_MUTANTS = [
    ("np-versions-are-not-compared", OPTIMISTIC + "checks.rs",
     "version.is_some_and(|version| base.is_some()", "false && version.is_some_and(|version| base.is_some()"),
    ("np-signature-pages-are-data", OPTIMISTIC + "checks.rs",
     "if chunk == &region.signature_page()", "if false && chunk == &region.signature_page()"),
    ("np-borders-of-packets-are-ignored", OPTIMISTIC + "checks.rs",
     "to_next_page.min(to_next_packet)", "to_next_page.min(to_next_packet.max(u64::MAX))"),
    ("np-chains-begin-before-versions-are-known", OPTIMISTIC + "issue.rs",
     "let Some((version, _)) = known else { return false };", "let Some((version, _)) = known else { return true };"),
    ("np-reads-pass-writes", OPTIMISTIC + "order.rs",
     "[Wait, Chain, Wait, Wait, Wait],", "[Pass, Chain, Wait, Wait, Wait],"),
    ("np-messages-pass-writes", OPTIMISTIC + "order.rs",
     "        table[earlier as usize][later as usize]\n",
     "        if later == Class::Message && !conflicts {\n            return Pass;\n        }\n"
     "        table[earlier as usize][later as usize]\n"),
    ("np-order-bits-are-ignored", OPTIMISTIC + "issue.rs",
     "if is_ordered || is_fenced {", "if (is_ordered && index > 1000) || is_fenced {"),
    ("np-requests-are-executed-twice", OPTIMISTIC + "target.rs",
     "if self.is_broken || self.is_repeated(id) {", "if self.is_broken || (self.is_repeated(id) && self.jobs.contains_key(&id)) {"),
    ("np-local-memory-is-not-held", OPTIMISTIC + "issue.rs",
     "if !entry.is_held && !entry.sges().is_empty() {", "if !entry.is_held && entry.sges().len() > 9 {"),
    ("np-repetitions-pass-each-other", OPTIMISTIC + "outcome.rs",
     "if is_marked && !self.entries.range(..index).any(is_after) {", "if is_marked && (index > 0 || !self.entries.range(..index).any(is_after)) {"),
    ("np-holds-end-before-the-repetition", OPTIMISTIC + "outcome.rs",
     "                return self.queue_data(index, task.range, Some(id));",
     "                self.calls.release(id);\n                return self.queue_data(index, task.range, Some(id));"),
    ("np-what-the-peer-has-moved-is-not-taken", OPTIMISTIC + "outcome.rs",
     "let into = entry.filter(is_brought)", "let into = entry.filter(|_| false).filter(is_brought)"),
    ("np-what-is-lent-has-no-data", OPTIMISTIC + "calls.rs",
     "let lent = memory.lend(id, &sge, Access::Read)?;", "let lent = memory.lend(id, &sge, Access::Write)?;"),
    ("np-answers-come-before-the-data", OPTIMISTIC + "target.rs",
     "                self.actions.push_back(TargetAction::Move(*transfer));\n                *job = Job::Moving(now);\n",
     "                let transfer = *transfer;\n                *job = Job::Moving(now);\n"
     "                self.handle_copied(id, memory);\n                self.actions.push_back(TargetAction::Move(transfer));\n"),
    ("np-copied-ranges-stay-held", OPTIMISTIC + "target.rs",
     "            *job = Job::Answered(since);\n            memory.release(token);\n", "            *job = Job::Answered(since);\n"),
    ("np-slots-are-lent-twice", OPTIMISTIC + "calls.rs",
     "self.next_id.wrapping_sub(oldest) < in_flight_max", "self.in_flight.len() < in_flight_max as usize"),
    ("np-absent-pages-are-written-unchecked", OPTIMISTIC + "checks.rs",
     "*base = version.filter(|version| version % 2 == 1);", "*base = *version;"),
]

# What no run of the simulation can show: a key that ends some microseconds too early, and a copy of a READ request that is being answered
# when its memory goes. The packet scripts of tests/packets do.
SCRIPT_MUTANTS = [
    ("repeated-reads-may-end-the-connection", RESPONDER + "emit.rs", "                if read.repeat {", "                if false {"),
    ("local-invalidate-does-not-wait", REQUESTER + "emit.rs",
     "SendOp::LocalInvalidate(_) => !self.queue.is_next_oldest(),", "SendOp::LocalInvalidate(_) => false,"),
]

FAULTS = [("", *fault) for fault in MUTANTS] + [("--np", *fault) for fault in NP_MUTANTS] + [
    ("packets", *fault) for fault in SCRIPT_MUTANTS]


def run(work, group, seeds):
    """Returns the failure that the simulation prints, or the packet scripts do, in one line; `None` if there is none."""
    if group == "packets":
        return run_scripts(work)
    planting.build(work, "cargo", "build", "--quiet", "--package", "terrace-sim")
    ran = planting.run(work, "cargo", "run", "--quiet", "--package", "terrace-sim", "--", *filter(None, [group]), "--seeds", str(seeds))
    if ran.returncode == 0:
        return None
    lines = [line for line in ran.stdout.splitlines() if re.match(r"seed \d+:", line)]
    return lines[0] if lines else ran.stdout[-200:]


def run_scripts(work):
    suite = ("cargo", "test", "--quiet", "--package", "terrace-transport", "--test", "packets")
    planting.build(work, *suite, "--no-run")
    ran = planting.run(work, *suite)
    lines = [line for line in ran.stdout.splitlines() if ".pkt" in line]
    return None if ran.returncode == 0 else lines[0].strip() if lines else ran.stdout[-200:]


def main():
    options = planting.parser(__doc__)
    options.add_argument("--seeds", type=int, default=2000)
    arguments = options.parse_args()
    return planting.plant_all(FAULTS, arguments, lambda work, group: run(work, group, arguments.seeds))


if __name__ == "__main__":
    sys.exit(main())
