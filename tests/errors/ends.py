"""Pairs of endpoints that carry a combination out."""

import itertools
import os
import time
from dataclasses import dataclass
from typing import Optional

from combinations import RECEIVING
from harness.endpoint import ALL, LOCAL_WRITE, SUCCESS, Endpoint, connect

MIB = 1 << 20
REGION_BYTES = 8 * MIB
# Each request has memory of its own, at the same offset at both ends.
STRIDE, AT = 112 << 10, 104
SCRATCH_BYTES = 8 * STRIDE
SEEDS = {"server": 1, "client": 2}
PROT_NONE, PROT_READ, PROT_ALL = 0, 1, 3
# A scan each 10 ms notes that pages have left memory.
SCANNED_S = 0.025
# Some of the pages have left after that, and others are about to.
CHURNED_S = 0.005
IN_TIME_S = 10
# With NICs that know nothing of absent pages, at both ends (docs/np-rdma.md).
IS_COMMODITY = os.environ.get("TERRACE_NIC") == "commodity"

_numbers = itertools.count()


def fresh_address():
    """A loopback address that no other test and no concurrent run uses."""
    pid, number = os.getpid(), next(_numbers)
    return f"127.{16 + number // 254 % 16}.{pid % 256}.{number % 254 + 1}"


def pattern(offset, seed):
    """A byte of the pattern that endpoints fill memory with."""
    bits = (1 << 64) - 1
    return (((offset + 1) * 0x9E3779B97F4A7C15 & bits) ^ ((seed + 1) * 0xBF58476D1CE4E5B9 & bits)) >> 29 & 0xFF


def word_at(offset, seed):
    return int.from_bytes(bytes(pattern(offset + index, seed) for index in range(8)), "little")


@dataclass(frozen=True)
class Outcome:
    """What a combination leads to, as far as programs can tell."""

    posted: tuple  # the errno of each request that was posted
    control: object  # the result of the control operation: a word, a status, or an errno as a negative number
    is_control_refused: bool
    completions: Optional[tuple]  # (id, status) at the client; None without a queue pair
    receives: Optional[tuple]  # the same at the server
    states: tuple  # of both queue pairs, client first
    events: tuple  # asynchronous events of both, client first
    # Of each request, its bytes: "old", "new", "zero", "torn"; "none" if they are not there.
    client_memory: tuple
    server_memory: tuple
    strays: int  # bytes between those of requests that have changed


class Pair:
    """A client and a server, with memory of one kind. Both are started when they are needed, again after they have ended."""

    def __init__(self, transport, *options, wrapper=()):
        self.options = ("--path", transport, *options)
        self.wrapper = wrapper
        self.ends = {}

    def start(self):
        if self.ends:
            return
        for side in SEEDS:
            end = Endpoint(fresh_address(), *self.options, wrapper=self.wrapper)
            self.ends[side] = end
            end("open")
            end.scratch = end.mr("scratch", "anon", SCRATCH_BYTES)
        connect(self.ends["client"], "setup", self.ends["server"], "setup")

    def stop(self):
        ends, self.ends = self.ends, {}
        for end in ends.values():
            end.stop()

    def run(self, combination):
        self.start()
        try:
            return Run(self.ends, combination).outcome()
        except BaseException:
            # Whatever state they are in, the next combination gets new ones.
            for end in self.ends.values():
                end.kill()
            raise
        finally:
            if any(end.process.poll() is not None for end in self.ends.values()):
                for end in self.ends.values():
                    end.kill()
                self.stop()


def send(end, commands):
    """Sends commands together."""
    if commands:
        end.send("\n".join(" ".join(map(str, command)) for command in commands))


def batch(end, commands):
    """Sends commands together. Returns their answers; an errno as a negative number."""
    send(end, commands)
    return [answer(end) for _ in commands]


def answer(end):
    try:
        return end.receive(30)
    except OSError as error:
        return -error.errno


class Run:
    """One combination on one pair."""

    def __init__(self, ends, combination):
        self.combination, self.control = combination, combination.control
        self.ends = ends
        self.client, self.server = ends["client"], ends["server"]
        self.requests = combination.requests
        self.span = len(self.requests) * STRIDE

    # ---- memory and queue pairs ----

    def prepare(self):
        regions = {}
        for side, end in self.ends.items():
            *_, regions[side], pair = batch(end, [
                ("map", "R", "anon", REGION_BYTES), ("fill", "R", 0, self.span, SEEDS[side]),
                ("submr", "r", "R", 0, REGION_BYTES, ALL), ("qp", "q", "rc")])
            end.qpns["q"] = pair["qpn"]
        self.regions, self.remote = regions, regions["server"]
        # Requests that nobody answers are not to wait for long; others never fail for want of time.
        words = ("timeout=10", "retry=1") if self.combination.is_awaiting_silence else ("timeout=16", "retry=7")
        if IS_COMMODITY and self.combination.is_awaiting_silence:
            words = ("timeout=14", "retry=1")
        self.client("connect", "q", self.server.address, self.server.qpns["q"], *words)
        self.server("connect", "q", self.client.address, self.client.qpns["q"], *words)
        if IS_COMMODITY:
            self.make_control_queue_pairs()
        self.bring_pages(regions)
        receives = [("recv", "q", index, "r", offset(index), size) for index, (operation, size) in enumerate(self.requests)
                    if operation in RECEIVING]
        batch(self.server, receives)
        self.receive_count = len(receives)

    def make_control_queue_pairs(self):
        """Has both ends make what NP-RDMA needs. Later, the kernel would map the buffers where a combination has unmapped memory, which is
        not ordinary memory's doing."""
        remote = self.server.scratch
        self.client("post", "q", "read", 0, "scratch", 0, 8, remote["addr"], remote["rkey"])
        assert self.client.status("q") == SUCCESS

    def bring_pages(self, regions):
        """Brings the pages into the state of the combination."""
        state = self.combination.state
        if state == "absent":
            for end in self.ends.values():
                end("pageout", "R", 0, self.span)
        elif state in ("present", "leaving"):
            for side, other in (("client", "server"), ("server", "client")):
                end, region = self.ends[side], regions[other]
                end("post", "setup", "read", 1, "scratch", 0, self.span, region["addr"], region["rkey"])
                assert end.status("setup") == SUCCESS
        time.sleep({"absent": SCANNED_S, "leaving": CHURNED_S}.get(state, 0))

    # ---- requests and the control operation ----

    def posts(self):
        for index, (operation, size) in enumerate(self.requests):
            # By the region's first address and key, whatever has become of it.
            words = ["post", "q", operation, index, "R", offset(index), size, self.remote["addr"] + offset(index),
                     self.remote["rkey"], f"lkey={self.regions['client']['lkey']}"]
            if operation == "cas":
                words += [f"compare={word_at(offset(index), SEEDS['server'])}", f"swap={word_at(offset(index), 3)}"]
            yield words

    def control_words(self):
        end_of_region = REGION_BYTES - self.span
        return {
            "dereg": ("dereg", "r"),
            "rereg_range": ("rereg", "r", "R", end_of_region, self.span, ALL),
            "rereg_access": ("rereg", "r", "R", 0, REGION_BYTES, LOCAL_WRITE if self.control.side == "server" else 0),
            "unmap": ("unmap", "R", 0, self.span),
            "protect": ("protect", "R", 0, self.span, PROT_NONE),
            "protect_read": ("protect", "R", 0, self.span, PROT_READ),
            "discard": ("discard", "R", 0, self.span, "dontneed"),
            "error": ("error", "q"),
            "destroy": ("destroy", "q"),
            "fork": ("fork", "_exit"),
        }[self.control.verb]

    def end_process(self, end):
        """Ends the end's process. Returns its status."""
        if self.control.verb == "kill":
            end.kill()
        else:
            end.process.stdin.close()
            end.process.wait(IN_TIME_S)
        return end.process.returncode

    def result_of(self, end, answered):
        """The result of a control operation, in words that are the same for every process."""
        if self.control.verb == "fork":
            return end("reap", answered["pid"])
        if isinstance(answered, dict):  # of a region that was registered again
            is_same = answered["rkey"] == self.regions[self.control.side]["rkey"]
            return "the key is the same" if is_same else "the key is another"
        return answered

    def act(self):
        """Posts the requests and carries the control operation out. Returns the results of both."""
        end, posts, moment = self.ends[self.control.side], list(self.posts()), self.combination.moment
        self.completions = []
        if moment != "before":
            send(self.client, posts)
        if moment == "after":
            posted = [answer(self.client) for _ in posts]
            self.completions = self.client.poll("q", len(posts), IN_TIME_S)
        time.sleep(self.combination.pause_s)
        if self.control.ends_process:
            if moment == "during":
                posted = [answer(self.client) for _ in posts]
            result = self.end_process(end)
        else:
            send(end, [self.control_words()])
            if moment == "during":
                posted = [answer(self.client) for _ in posts]
            result = self.result_of(end, answer(end))
        if moment == "before":
            posted = batch(self.client, posts)
        return tuple(value if isinstance(value, int) else 0 for value in posted), result

    # ---- what is left ----

    def has(self, side, what):
        """Whether an end has a process, or a queue pair, after the control operation."""
        ended = self.control.ends_process if what == "process" else self.control.ends_queue_pair
        return side != self.control.side or not ended

    def outcome(self):
        self.prepare()
        posted, control = self.act()
        completions = None
        if self.has("client", "queue pair"):
            missing = len(self.requests) - len(self.completions)
            self.completions += self.client.poll("q", missing, IN_TIME_S) if missing else []
            completions = tuple(self.completions)
        elif self.completions:
            completions = tuple(self.completions)
        sides = ("client", "server")
        states = tuple(self.ends[side]("state", "q")["state"] if self.has(side, "queue pair") else None for side in sides)
        events = tuple(tuple(self.ends[side]("events")) if self.has(side, "process") else None for side in sides)
        receives = None
        for side, end in self.ends.items():
            if self.has(side, "queue pair"):
                # What is left is flushed, and nothing is executed any more.
                end("error", "q")
        if self.has("server", "queue pair"):
            receives = tuple(self.server.poll("q", self.receive_count, IN_TIME_S) if self.receive_count else [])
        memory = {side: self.memory(side) for side in SEEDS}
        strays = sum(self.strays(side) for side in SEEDS)
        self.clean()
        is_refused = not self.control.ends_process and isinstance(control, int)
        return Outcome(posted, control, is_refused, completions, receives, states, events, memory["client"], memory["server"],
                       strays)

    def has_memory(self, side):
        return side != self.control.side or not self.control.ends_memory

    def memory(self, side):
        """What the requests' bytes at one end are."""
        if not self.has_memory(side):
            return ("none",) * len(self.requests)
        end, other = self.ends[side], "server" if side == "client" else "client"
        if side == self.control.side and self.control.verb == "protect":
            end("protect", "R", 0, self.span, PROT_ALL)
        sizes = [size for _, size in self.requests]
        commands = [("check", "R", offset(index), size, seed) for index, size in enumerate(sizes)
                    for seed in (SEEDS[side], SEEDS[other])]
        differ = [found["differ"] for found in batch(end, commands)]
        words = [found["value"] for found in batch(end, [("word", "R", offset(index)) for index in range(len(sizes))])]
        return tuple(self.state_of(side, index, *differ[2 * index:2 * index + 2], words[index]) for index in range(len(sizes)))

    def state_of(self, side, index, from_own, from_other, word):
        old = word_at(offset(index), SEEDS["server"])
        new = {"add": (old + 1) % (1 << 64), "cas": word_at(offset(index), 3)}.get(self.requests[index][0])
        if side == "server" and word == new:
            return "new"
        return "old" if from_own == 0 else "new" if from_other == 0 else "zero" if word == 0 else "torn"

    def strays(self, side):
        """The number of changed bytes that no request names."""
        if not self.has_memory(side):
            return 0
        ends = [0, *(offset(index) + size for index, (_, size) in enumerate(self.requests))]
        starts = [*(offset(index) for index in range(len(self.requests))), self.span]
        gaps = [("check", "R", start, end - start, SEEDS[side]) for start, end in zip(ends, starts)]
        return sum(found["differ"] for found in batch(self.ends[side], gaps))

    def clean(self):
        for side, end in self.ends.items():
            if not self.has(side, "process"):
                continue
            commands = [("destroy", "q")] if self.has(side, "queue pair") else []
            if (side, "dereg") != (self.control.side, self.control.verb):
                commands.append(("dereg", "r"))
            done = batch(end, [*commands, ("free", "R"), ("events",)])
            assert all(not isinstance(result, int) for result in done), done


def offset(index):
    """The offset of a request's memory."""
    return index * STRIDE + AT
