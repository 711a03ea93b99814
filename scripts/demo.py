#!/usr/bin/env python3
"""The demo: unmodified RDMA programs on a machine without RDMA.

(a) Four of perftest's tools, each between two `terrace run` processes, and a table of their results.
(b) A file region: a server with a memory limit of 256 MiB maps and registers a 1 GiB file; a client READs all of it and the
    SHA-256 of the received bytes is compared with the file's.
"""

import argparse
import contextlib
import hashlib
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from harness import cgroup, perftest, procs  # noqa: E402

MIB = 1 << 20
WORK = procs.ROOT / "build/demo"
FILE_REGION = procs.ROOT / "build/examples/file_region"


def latency(row):
    return f"{perftest.typical_us(row):.2f} us typical, {row['99% percentile[usec]']:.2f} us at the 99th percentile"


def bandwidth(row):
    return f"{perftest.average_mib_s(row):,.0f} MiB/s"


def message_rate(row):
    return f"{perftest.messages_per_s(row):,.0f} per second"


PERFTEST = [
    # tool, its arguments, its label, the function that takes its result from the table
    ("ib_read_lat", ["-s", "4096"], "4 KiB READ, one at a time", latency),
    ("ib_write_bw", ["-s", "65536"], "64 KiB WRITE stream", bandwidth),
    ("ib_send_bw", ["-s", "65536"], "64 KiB SEND stream", bandwidth),
    ("ib_atomic_bw", [], "8-byte fetch-and-add", message_rate),
]


class Progress:
    """A progress line: rewritten in place on a terminal, otherwise printed at most every two seconds."""

    def __init__(self):
        self.terminal, self.shown = sys.stdout.isatty(), time.monotonic()

    def show(self, text):
        if self.terminal:
            print(f"\r    {text}\x1b[K", end="", flush=True)
        elif time.monotonic() - self.shown > 2:
            self.shown = time.monotonic()
            print(f"    {text}", flush=True)

    def clear(self):
        if self.terminal:
            print("\r\x1b[K", end="", flush=True)


class Failure(Exception):
    """An error message of one line."""


def main():
    # The figures represent a peer on another host. A same-host peer would map the file and be charged for its memory.
    os.environ["TERRACE_PATH"] = "udp"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file-mib", type=int, default=1024, help="size of the file (default 1024)")
    parser.add_argument("--limit-mib", type=int, default=256, help="memory the server may use (default 256)")
    parser.add_argument("--part", choices=["a", "b"], help="only this part")
    options = parser.parse_args()
    procs.exit_on_signals()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    failures = 0
    for name, part in (("a", show_perftest), ("b", lambda: show_file_region(options))):
        if options.part in (None, name):
            try:
                part()
            except Failure as failure:
                failures += 1
                print(f"FAILED: {failure}", flush=True)
    return 1 if failures else 0


def show_perftest():
    print("(a) perftest between two processes on this machine, over UDP on", procs.HOST)
    rows, progress = [], Progress()
    for tool, arguments, label, number in PERFTEST:
        progress.show(f"{tool} ...")
        port = procs.free_port()
        server = procs.under_terrace([tool, "-F", "-p", str(port), *arguments])
        pair = procs.run_pair(server, [*server, procs.HOST], port, WORK / tool)
        table = perftest.parse_table(pair.client.out)
        if pair.server.status != 0 or pair.client.status != 0 or not table:
            reason = pair.note or f"server {pair.server.verdict}, client {pair.client.verdict}"
            raise Failure(f"{tool}: {reason}; its output is in {WORK / tool}")
        rows.append((tool, label, number(table[-1])))
    progress.clear()
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(flush=True)


def show_file_region(options):
    print(f"(b) a {options.file_mib} MiB file, registered by a server that may use {options.limit_mib} MiB of memory")
    path = WORK / "region.bin"
    try:
        expected = make_file(path, options.file_mib)
        with limited_group(options) as group:
            received, from_disk = transfer(group, path)
            report_memory(group, from_disk, options)
    finally:
        path.unlink(missing_ok=True)
    print(f"    SHA-256 of the file      {expected}")
    print(f"    SHA-256 of the READ data {received}")
    if received != expected:
        raise Failure("the hashes differ")
    print("    They match.", flush=True)


def limited_group(options):
    """A control group with the limit; where this user may not limit memory, no group, which is said."""
    try:
        return cgroup.memory_group(f"terrace-demo-{os.getpid()}", options.limit_mib * MIB)
    except (OSError, cgroup.Unavailable) as reason:
        print(f"    the server is not limited: {reason}")
        return contextlib.nullcontext()


def make_file(path, mib):
    """Writes pseudo-random bytes and drops them from the page cache; returns their SHA-256.

    The kernel charges a cached page to the control group that read it first: the server would use those pages
    uncharged.
    """
    free_mib = shutil.disk_usage(path.parent).free // MIB
    if free_mib < mib + 64:
        raise Failure(f"{path.parent} has {free_mib} MiB left on its disk, the file needs {mib}")
    generator, digest, progress = random.Random(1), hashlib.sha256(), Progress()
    with open(path, "wb") as file:
        for done in range(1, mib + 1):
            block = generator.randbytes(MIB)
            digest.update(block)
            file.write(block)
            if done % 32 == 0:
                progress.show(f"writing the file: {done} of {mib} MiB")
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    progress.clear()
    return digest.hexdigest()


def transfer(group, path):
    """Serves the file from inside the group, if there is one, and fetches it from outside.

    Returns the SHA-256 of the received bytes, and the number of bytes that the server read from the disk.
    """
    port = str(procs.free_port())
    served = procs.under_terrace([str(FILE_REGION), "serve", "-p", port, str(path)])
    server = procs.Program(group.argv(served) if group else served, WORK / "file_region", "server")
    try:
        await_listener(server, int(port))
        command = procs.under_terrace([str(FILE_REGION), "fetch", "-p", port, procs.HOST])
        # The client's progress line goes to the terminal; the data goes to sha256sum.
        client = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        hasher = subprocess.Popen(["sha256sum"], stdin=client.stdout, stdout=subprocess.PIPE, text=True)
        client.stdout.close()
        from_disk = 0
        while hasher.poll() is None:
            from_disk = procs.disk_bytes_read(server.process.pid) or from_disk
            time.sleep(0.05)
        if client.wait() != 0:
            raise Failure(f"the client ended with status {client.returncode}; the server's output is in {server.log_dir}")
        if server.wait(10) != 0:
            raise Failure(f"the server: {server.outcome().verdict}: {server.outcome().err.strip()}")
    finally:
        server.stop()
    for line in server.outcome().err.splitlines():
        print("    " + line)
    return hasher.stdout.read().split()[0], from_disk


def await_listener(server, port, seconds=20):
    deadline = time.monotonic() + seconds
    while not procs.is_listening(port):
        if server.wait(0.02) is not None or time.monotonic() > deadline:
            raise Failure(f"the server did not start: {server.outcome().err.strip()}")


def report_memory(group, from_disk, options):
    if group is None:
        return
    peak = group.peak_bytes()
    shown = "not recorded by this kernel" if peak is None else f"{peak / MIB:.0f} MiB"
    print(f"    the server's peak memory, page cache included: {shown} (limit {options.limit_mib} MiB)")
    print(f"    the server read {from_disk // MIB} MiB from disk meanwhile", flush=True)
    if peak is not None and peak > options.limit_mib * MIB:
        raise Failure("the server used more memory than its limit")
    # The counter may be slightly low, because it was last read shortly before the end.
    if from_disk < 0.9 * options.file_mib * MIB:
        raise Failure("the file was in memory that is not charged to the server, so the limit proves nothing")


if __name__ == "__main__":
    sys.exit(main())
