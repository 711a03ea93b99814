"""Clients that are stopped (SIGSTOP, a debugger, a frozen control group) in the middle of accesses to the memory of a node of their host.

A client of the same host reads and writes a node's memory itself (docs/decisions/0031). Stopped in the middle of an access, it may keep the
page that it accesses, and nothing else: other clients go on, and the node ends on SIGTERM.
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
# The whole region fits into memory, because same-host clients access only resident pages directly.
REGION, REGION_BYTES, DRAM_BYTES = "table", 16 * MIB, 16 * MIB
CLIENTS, SPAN = 3, 4 * MIB
ROUNDS, WATCHED_S = 6, 0.4
# At its end the node waits up to a second for clients in the middle of an access (`READERS_AT_CLOSE`), and writes its
# region back.
SHUTDOWN_S = 10


class Stopped:
    """The process is stopped while this context is open."""

    def __init__(self, process):
        self.process = process

    def __enter__(self):
        self.process.send_signal(signal.SIGSTOP)

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGCONT)


def rounds_of(streams, seconds):
    """The rounds of all streams in this time; raises if one completed none."""
    for stream in streams:
        stream.start()
    time.sleep(seconds)
    rounds = [stream.stop() for stream in streams]
    if 0 in rounds:
        raise bystanders.Failure(f"a client made no progress: {rounds}")
    return sum(rounds)


class Scene:
    """A node, and same-host clients of its region."""

    def __init__(self, stack, addresses, log_dir, name):
        file = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))) / "table.bin"
        frames = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        address = next(addresses)
        self.node = procs.Program(
            [procs.terrace_binary(), "serve", "--region", f"{REGION}={file}:{REGION_BYTES}", "--frames", frames, "--dram", DRAM_BYTES, "--listen", address,
             "--path", "auto"], log_dir, name)
        stack.callback(self.node.stop)
        procs.wait_until(lambda: "serving at" in self.node.paths[0].read_text(), "the node serves")
        self.streams = []
        for number in range(CLIENTS):
            end = bystanders.endpoint(next(addresses), "--path", "auto")
            stack.callback(end.stop)
            stream, _ = bystanders.stream_to_node(f"client {number}", end, address, REGION, number * SPAN, SPAN)
            self.streams.append(stream)

    def stop_one(self, delay_s):
        """Stops a client `delay_s` seconds after it starts. Returns the others' rounds with the client at rest and with
        it stopped, and how many seconds the node took to end."""
        victim, *others = self.streams
        # The first round is not measured: it fetches the units into memory.
        rounds_of(self.streams, WATCHED_S)
        at_rest = rounds_of(others, WATCHED_S)
        victim.start()
        time.sleep(delay_s)
        with Stopped(victim.end.process):
            while_stopped = rounds_of(others, WATCHED_S)
            self.node.process.send_signal(signal.SIGTERM)
            started = time.monotonic()
            if self.node.wait(SHUTDOWN_S) is None:
                raise bystanders.Failure(f"the node did not end within {SHUTDOWN_S} s")
        return at_rest, while_stopped, time.monotonic() - started


def run(addresses, log_dir, fail, rounds=ROUNDS):
    """Runs all rounds; `fail` gets each failure. Returns a summary line."""
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
