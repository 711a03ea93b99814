"""Clients that are stopped (SIGSTOP, a debugger, a frozen control group) while they reach into the memory of a node of their host.

A client of the same host reads and writes a node's memory itself (docs/decisions/0031). Stopped in the middle of an access, it may keep the
page that it is at, and nothing else: other clients go on, and the node ends when it is asked to.
"""

import contextlib
import pathlib
import random
import signal
import tempfile
import time

import bystanders
from harness import procs

MIB = 1 << 20
# All of the region fits into memory: what clients of the host reach by themselves is what is there.
REGION, REGION_BYTES, DRAM_BYTES, PERIOD_MS = "table", 16 * MIB, 16 * MIB, 20
CLIENTS, SPAN = 3, 4 * MIB
ROUNDS, WATCHED_S = 6, 0.4
# The node waits for clients that are in the middle of accesses for a second (`READERS_AT_CLOSE`), and writes its region back.
SHUTDOWN_S = 10


class Stopped:
    """The process does not run while this is open."""

    def __init__(self, process):
        self.process = process

    def __enter__(self):
        self.process.send_signal(signal.SIGSTOP)

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGCONT)


def rounds_of(streams, seconds):
    """How often they went round meanwhile, together; raises when one was kept from it."""
    for stream in streams:
        stream.start()
    time.sleep(seconds)
    rounds = [stream.stop() for stream in streams]
    if 0 in rounds:
        raise bystanders.Failure(f"a client stood still: {rounds}")
    return sum(rounds)


class Scene:
    """A node, and clients that have its region in memory."""

    def __init__(self, stack, addresses, log_dir, name):
        file = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))) / "table.bin"
        address = next(addresses)
        self.node = procs.Program(
            [procs.terrace_binary(), "serve", "--region", f"{REGION}={file}:{REGION_BYTES}", "--dram", DRAM_BYTES, "--listen", address,
             "--path", "auto", "--period", PERIOD_MS], log_dir, name)
        stack.callback(self.node.stop)
        procs.wait_until(lambda: "serving at" in self.node.paths[0].read_text(), "the node serves")
        self.streams = []
        for number in range(CLIENTS):
            end = bystanders.endpoint(next(addresses), "--path", "auto")
            stack.callback(end.stop)
            stream, _ = bystanders.stream_to_node(f"client {number}", end, address, REGION, number * SPAN, SPAN)
            self.streams.append(stream)

    def stop_one(self, moment):
        """Stops a client at this moment. Others work on, and the node ends when it is asked to. Returns the others' rounds with the
        client at rest and with it stopped, and how long the node took to end."""
        victim, *others = self.streams
        # Once more than is watched: their units come into memory first.
        rounds_of(self.streams, WATCHED_S)
        at_rest = rounds_of(others, WATCHED_S)
        victim.start()
        time.sleep(moment)
        with Stopped(victim.end.process):
            while_stopped = rounds_of(others, WATCHED_S)
            self.node.process.send_signal(signal.SIGTERM)
            started = time.monotonic()
            if self.node.wait(SHUTDOWN_S) is None:
                raise bystanders.Failure(f"the node did not end within {SHUTDOWN_S} s")
        return at_rest, while_stopped, time.monotonic() - started


def run(addresses, log_dir, fail, rounds=ROUNDS):
    """The whole of it, with `fail` told what is wrong. Returns a line that says what was seen."""
    rng = random.Random(5)
    seen = []
    for number in range(rounds):
        try:
            with contextlib.ExitStack() as stack:
                scene = Scene(stack, addresses, log_dir, f"stops-{number}")
                seen.append(scene.stop_one(rng.uniform(0.02, 0.05)))
        except (bystanders.Failure, procs.UnexpectedEnd) as error:
            fail(f"round {number}: {error}")
    at_rest, while_stopped, ended_s = (list(column) for column in zip(*seen)) if seen else ([1], [0], [0])
    return (f"others at {sum(while_stopped) / sum(at_rest):.2f} of their rate while a client is stopped; "
            f"the node ended in {max(ended_s):.1f} s at most; {rounds} rounds")
