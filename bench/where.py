"""Attributes the time of a READ of 4 KiB over UDP to components, at both ends, and compares it with bare UDP.

    python3 bench/where.py [--json]         (`make bench-where` builds the programs)

perf samples both ends of `crates/nic/examples/speed`, with one READ at a time. Each sample belongs to one of the components below, by
the functions of its stack. Each end's column adds up to the round trip: an end polls its socket while the other one runs, so its time
for receiving is mostly waiting. The ends also overlap: a packet is at its receiver before the sender's system call has returned.
Requires `perf` (Debian: linux-perf) with sufficient rights.
"""

import argparse
import collections
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "examples"
SECONDS = 3
READ_BYTES, HEADERS_BYTES = 4096, 16

# A sample belongs to the first component whose pattern matches a frame of its stack.
RECEIVE = "receiving, and waiting for the other end"
COMPONENTS = [
    (RECEIVE, r"recvmsg"),
    ("sending: delivery to the peer's socket (softirq of the loopback)", r"do_softirq|net_rx_action"),
    ("sending: the system call, UDP and IP", r"sendmsg|sendto"),
    ("other system calls", r"do_syscall_64|entry_SYSCALL"),
    ("ICRC", r"icrc|crc32"),
    ("copying between the program's memory and packets", r"terrace_fault_copy|terrace_hostmem|fault::|memmove|memcpy"),
    ("the clock", r"clock_gettime|MonotonicClock"),
    ("packets: headers", r"terrace_wire"),
    ("the protocol (transport)", r"terrace_transport"),
    ("keys and regions (memory)", r"terrace_memory"),
    ("same-host peers (shm)", r"terrace_shm"),
    ("batches and sockets (fabric)", r"terrace_fabric"),
    ("queues, locks, progress (nic)", r"terrace_nic"),
]
REST = "the program and others"


def component_of(frames):
    stack = "\n".join(frames)
    return next((name for name, pattern in COMPONENTS if re.search(pattern, stack)), REST)


def samples(text):
    """(process, frames) of each sample of `perf script -F pid,ip,sym`: the kernel's frames and the innermost one of the program, because
    the program has no frame pointers."""
    for block in text.split("\n\n"):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        if lines:
            frames = [line.partition(" ")[::2] for line in lines[1:]]
            in_kernel = sum(1 for _ in itertools.takewhile(lambda frame: frame[0].startswith("ffff"), frames))
            yield int(lines[0].split()[0]), [symbol for _, symbol in frames[:in_kernel + 1]]


def shares(text):
    """For each process, the share of samples of each component."""
    counts = collections.defaultdict(collections.Counter)
    for process, frames in samples(text):
        counts[process][component_of(frames)] += 1
    return {process: {component: count / sum(components.values()) for component, count in components.items()}
            for process, components in counts.items()}


def spent(client, server, round_trip_us):
    """Microseconds of a READ by component: [at the client, at the server]."""
    return {name: [end.get(name, 0) * round_trip_us for end in (client, server)] for name in [*dict(COMPONENTS), REST]}


def run(*argv, **environment):
    return subprocess.run(argv, check=True, capture_output=True, text=True, env={**os.environ, **environment}).stdout


def measure():
    with tempfile.TemporaryDirectory() as directory:
        data = f"{directory}/perf.data"
        out = run("perf", "record", "--quiet", "--call-graph", "fp", "--output", data, str(TARGET / "speed"),
                  f"read-{READ_BYTES}-1", TERRACE_PATH="udp", SPEED_MS=str(SECONDS * 1000))
        text = run("perf", "script", "--input", data, "--fields", "pid,ip,sym")
    # The same without perf.
    plain = run(str(TARGET / "speed"), f"read-{READ_BYTES}-1", TERRACE_PATH="udp", SPEED_MS=str(SECONDS * 1000))
    floor = json.loads(run(str(TARGET / "udp_reference"), "rtt", "--request", str(HEADERS_BYTES + 16), "--reply",
                           str(READ_BYTES + HEADERS_BYTES), "--seconds", str(SECONDS), "--json"))
    by_process = sorted(shares(text).items(), key=lambda entry: entry[0])
    return median(out), median(plain), floor, [components for _, components in by_process][:2]


def median(out):
    return float(re.search(rf"read {READ_BYTES} B: median ([0-9.]+) us", out)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    perf_us, plain_us, floor, (client, server) = measure()
    table = spent(client, server, plain_us)
    floor_us = floor["rtt_us_p50"]
    if options.json:
        print(json.dumps({"round_trip_us": plain_us, "under_perf_us": perf_us, "bare_udp_us": floor_us, "components_us": table}))
        return 0
    print(f"READ of {READ_BYTES} bytes, median: {plain_us:.2f} us ({perf_us:.2f} with perf); "
          f"bare UDP, the same bytes: {floor_us:.2f} us ({plain_us / floor_us:.2f} times)\n")
    print(f"{'us':<66}{'client':>8}{'server':>8}")
    for name, (at_client, at_server) in sorted(table.items(), key=lambda entry: -sum(entry[1])):
        print(f"{name:<66}{at_client:>8.2f}{at_server:>8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
