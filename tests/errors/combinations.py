"""The combinations, and the rules for their outcomes.

A combination is a transport, a control operation at one end, its moment, the traffic, and a state of the pages:
`udp_server_dereg_during_read_long_absent`. Its control operation breaks what the requests need, or does not. The rules say
what may become of the requests then, with ordinary memory as with paged memory.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

from harness.endpoint import LOC_ACCESS_ERR, LOC_PROT_ERR, REM_ACCESS_ERR, REM_OP_ERR, RETRY_EXC_ERR, SUCCESS, WR_FLUSH_ERR

SHORT, LONG = 64, 100_000

# Requests of each traffic: the operation and its number of bytes. Those of one traffic are outstanding together.
TRAFFICS = {
    "read": [("read", SHORT)],
    "read_long": [("read", LONG)],
    "write": [("write", SHORT)],
    "write_long": [("write", LONG)],
    "write_imm": [("write_imm", SHORT)],
    "write_imm_long": [("write_imm", LONG)],
    "add": [("add", 8)],
    "cas": [("cas", 8)],
    "send": [("send", SHORT)],
    "send_long": [("send", LONG)],
    "reads": [("read", LONG), ("read", SHORT), ("read", LONG), ("read", LONG), ("read", SHORT), ("read", LONG)],
    "writes": [("write", LONG), ("write", SHORT), ("write", LONG), ("write_imm", SHORT), ("write", LONG), ("write_imm", LONG)],
    "several": [("write_imm", LONG), ("read", LONG), ("add", 8), ("send", LONG), ("cas", 8), ("write", LONG), ("read", SHORT),
                ("send", SHORT)],
}

# The moment of the control operation: before the requests are posted; after that, when they may be under way; after all of
# them have completed. Only `during` is a race.
MOMENTS = ("before", "during", "after")
# `absent`: on the disk. `leaving`: evicted at random and at full speed, and read again (TERRACE_CHURN).
STATES = ("absent", "present", "leaving")
TRANSPORTS = ("udp", "local")

RECEIVING = ("send", "write_imm")
ATOMIC = ("add", "cas")


@dataclass(frozen=True)
class Control:
    """A control operation, and what it does to requests that are executed after it."""

    side: str
    verb: str
    # The requests succeed all the same.
    spares: tuple = ()
    # The status of the first other request. Those behind it are flushed. `None`: nobody sees completions.
    fails: Optional[int] = SUCCESS
    # The same for a SEND: its responder does not find the memory of the receive.
    send_fails: Optional[int] = None
    # The end has no memory, or no process, whose bytes could be compared.
    ends_memory: bool = False
    changes_bytes: bool = False
    ends_process: bool = False
    ends_queue_pair: bool = False

    @property
    def name(self):
        return f"{self.side}_{self.verb}"

    def status_of(self, operation):
        if operation in self.spares or self.fails == SUCCESS:
            return SUCCESS
        return self.send_fails if operation == "send" and self.send_fails is not None else self.fails

    def stops_execution_at(self, operation):
        """Whether the responder executes no request behind one that fails. It has refused that one, unless it is a READ:
        without a fence, requests behind a READ may be executed before its data are read (IBTA volume 1, 9.5)."""
        return self.fails == REM_ACCESS_ERR and operation != "read"


def _memory_controls():
    """What takes memory away: the responder refuses requests, the requester's own requests fail."""
    for verb in ("dereg", "rereg_range", "unmap", "protect"):
        yield Control("server", verb, (), REM_ACCESS_ERR, REM_OP_ERR, ends_memory=verb == "unmap")
        yield Control("client", verb, (), LOC_PROT_ERR, ends_memory=verb == "unmap")
    # A read-only mapping.
    yield Control("server", "protect_read", ("read",), REM_ACCESS_ERR, REM_OP_ERR)
    yield Control("client", "protect_read", ("send", "write", "write_imm"), LOC_PROT_ERR)
    # What is left is the right to be written locally, and to be sent.
    yield Control("server", "rereg_access", ("send",), REM_ACCESS_ERR)
    # What is left is the right to be sent.
    yield Control("client", "rereg_access", ("send", "write", "write_imm"), LOC_PROT_ERR)


def _other_controls():
    # A queue pair in the state ERR, or none, answers nothing.
    yield Control("server", "error", fails=RETRY_EXC_ERR)
    yield Control("server", "destroy", fails=RETRY_EXC_ERR, ends_queue_pair=True)
    for verb in ("exit", "kill"):
        yield Control("server", verb, fails=RETRY_EXC_ERR, ends_memory=True, ends_process=True, ends_queue_pair=True)
        yield Control("client", verb, fails=None, ends_memory=True, ends_process=True, ends_queue_pair=True)
    yield Control("client", "error", fails=WR_FLUSH_ERR)
    yield Control("client", "destroy", fails=None, ends_queue_pair=True)
    for side in ("server", "client"):
        yield Control(side, "fork")
        # The bytes are zeros.
        yield Control(side, "discard", changes_bytes=True)


CONTROLS = {control.name: control for control in (*_memory_controls(), *_other_controls())}


@dataclass(frozen=True)
class Combination:
    """One of all combinations."""

    transport: str
    control: Control
    moment: str
    traffic: str
    state: str

    @property
    def name(self):
        return "_".join((self.transport, self.control.name, self.moment, self.traffic, self.state))

    @property
    def without_state(self):
        """What it is with ordinary memory, whose pages have none of the states."""
        return dataclasses.replace(self, state="ordinary")

    @property
    def requests(self):
        return TRAFFICS[self.traffic]

    @property
    def statuses(self):
        """Those of the requests if each were executed alone after the control operation."""
        return [self.control.status_of(operation) for operation, _ in self.requests]

    @property
    def first_concerned(self):
        """The number of requests in front of the first that the control operation makes fail."""
        return next((index for index, status in enumerate(self.statuses) if status != SUCCESS), len(self.requests))

    @property
    def difference(self):
        """The listed difference that it is an example of, or None."""
        return next((difference for difference in DIFFERENCES if difference.concerns(self)), None)

    @property
    def is_race(self):
        """Whether ordinary memory alone has several outcomes."""
        if self.moment == "during":
            return self.control.verb != "fork"
        # A READ fails at the requester when its response arrives: requests behind it may have been executed by then.
        return self.moment == "before" and self.control.fails == LOC_PROT_ERR and 0 < self.first_concerned < len(self.requests)

    @property
    def pause_s(self):
        """How long requests for paged memory are under way before the control operation: a time drawn from the name."""
        is_paged = self.state in STATES
        steps = zlib.crc32(self.name.encode()) % 5 * len(self.requests)
        return steps * 0.5e-3 if self.moment == "during" and is_paged else 0

    @property
    def is_awaiting_silence(self):
        """Whether requests fail because nobody answers them."""
        return self.control.fails == RETRY_EXC_ERR and self.moment != "after"

    @property
    def is_possible(self):
        """Nothing is posted to a queue pair that has been destroyed, nor by a process that has ended."""
        return self.moment != "before" or self.control.side == "server" or not self.control.ends_queue_pair

    def successes(self):
        """The numbers of requests that may succeed."""
        count = len(self.requests)
        if self.moment == "after":
            return (count,)
        may_continue = self.moment == "during" or self.difference is not None
        return range(self.first_concerned, count + 1) if may_continue else (self.first_concerned,)


@dataclass(frozen=True)
class Difference:
    """A difference between paged and ordinary memory that stays."""

    concerns: Callable[[Combination], bool]
    reason: str


DIFFERENCES = (
    Difference(
        lambda combination: combination.transport == "local" and combination.control.side == "server"
        and combination.control.ends_process and combination.moment == "before",
        "A same-host peer maps a swap file, and accesses it by itself until the server's socket tells it of the end. So accesses"
        " within a millisecond of the end may succeed. They do as often with ordinary memory over a shared mapping of a file (9 of"
        " 60 attempts over a memfd, 11 over a swap file). Ordinary private memory is copied by the kernel, which refuses.",
    ),
)
# Not a matter of requests, and therefore in no combination: children of `fork` do not have registered memory that is paged,
# as after ibv_fork_init(3) with other devices (docs/decisions/0052-private-memory-becomes-a-file.md).


def combinations(transport):
    """The combinations over one transport, by name."""
    parts = itertools.product(CONTROLS.values(), MOMENTS, TRAFFICS, STATES)
    every = (Combination(transport, *part) for part in parts)
    return {combination.name: combination for combination in every if combination.is_possible}


def breaches(combination, outcome):
    """What the rules do not permit in an outcome."""
    found, control, count = [], combination.control, len(combination.requests)
    if any(outcome.posted) or outcome.is_control_refused:
        found.append(f"posts returned {outcome.posted}, and the control operation {outcome.control}")
    done = 0
    if outcome.completions is not None:
        ids, results = [identifier for identifier, _ in outcome.completions], [status for _, status in outcome.completions]
        done = next((index for index, status in enumerate(results) if status != SUCCESS), count)
        if ids != list(range(count)):
            found.append(f"completions of {ids}, of {count} requests")
        if done not in combination.successes():
            found.append(f"{done} requests succeeded, {combination.moment} the control operation")
        elif done < count and results[done:] != [combination.statuses[done]] + [WR_FLUSH_ERR] * (count - done - 1):
            found.append(f"request {done} and those behind it ended with {results[done:]}")
    receiving = [index for index, (operation, _) in enumerate(combination.requests) if operation in RECEIVING]
    if outcome.receives is not None:
        ids, results = [identifier for identifier, _ in outcome.receives], [status for _, status in outcome.receives]
        taken = next((number for number, status in enumerate(results) if status != SUCCESS), len(results))
        if ids != receiving or taken < sum(index < done for index in receiving):
            found.append(f"receives {ids}, of which {taken} succeeded")
        # That of a refused message fails with it, unless the message was refused before its last packet.
        refused = {LOC_PROT_ERR, LOC_ACCESS_ERR, WR_FLUSH_ERR}
        if set(results[taken:taken + 1]) - refused or set(results[taken + 1:]) - {WR_FLUSH_ERR}:
            found.append(f"receives that failed ended with {results[taken:]}")
    for index, bytes_at_ends in enumerate(zip(outcome.client_memory, outcome.server_memory)):
        if index < done and not control.changes_bytes and not {"new", "none"} & set(bytes_at_ends):
            found.append(f"request {index} succeeded without an effect")
        is_behind = index > done and outcome.completions is not None
        if is_behind and control.stops_execution_at(combination.requests[done][0]) and bytes_at_ends[1] == "new":
            found.append(f"request {index} was executed behind one that was refused")
    if outcome.strays and not control.changes_bytes:
        found.append(f"{outcome.strays} bytes changed that no request names")
    return found
