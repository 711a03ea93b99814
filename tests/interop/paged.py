"""Unmodified programs whose region is a file larger than their server's memory limit: `terrace run --dram`."""

import contextlib
import filecmp
import json
import os
import random
import subprocess
import time

from cases import last_output
from matrix import LOSSY_PLAN
from harness import cgroup, perftest, procs

MIB = 1 << 20
FILE_REGION = procs.ROOT / "build/examples/file_region"
STRESS = procs.ROOT / "build/interop/programs/paged_stress"

FILE_MIB = 128
DRAM_MIB = 24
# The server's memory limit, page cache included.
LIMIT_MIB = 80
# Pages are evicted at random, at the maximum rate.
CHURN = {"TERRACE_CHURN": "1"}


class TieredPair:
    """A server under `terrace run --dram` within a memory limit, and its client."""

    def __init__(self, log_dir, server, client, port, env=None, client_options=(), go_file=None):
        self.log_dir, self.port, self.env = log_dir, port, env or {}
        # The client does not end before this file exists.
        self.go_file = go_file
        self.server_argv = procs.under_terrace(server, "--dram", f"{DRAM_MIB}M")
        self.client_argv = procs.under_terrace(client, *client_options)
        self.memory = None  # the last memory statistics of `terrace stat` for the server

    def run(self, timeout_s=120):
        """Runs both to their end. Returns an error or None."""
        with cgroup.memory_group(f"terrace-paged-{os.getpid()}", LIMIT_MIB * MIB) as group:
            self.server = procs.Program(group.argv(self.server_argv), self.log_dir, "server", self.env)
            try:
                return self._run(group, timeout_s)
            finally:
                self.server.stop()

    def _run(self, group, timeout_s):
        deadline = time.monotonic() + timeout_s
        while not procs.is_listening(self.port):
            if self.server.wait(0.05) is not None or time.monotonic() > deadline:
                return f"the server did not start: {last_output(self.server.outcome())}"
        self.client = procs.Program(self.client_argv, self.log_dir, "client")
        try:
            while self.client.wait(0.2 if self.go_file is None else 0) is None:
                self._sample()
                if self.go_file is not None and self._misses() > 0:
                    self.go_file.touch()
                    self.go_file = None
                if time.monotonic() > deadline:
                    return f"the client did not end in {timeout_s} s; {self._statistics()}"
        finally:
            self.client.stop()
        for name, program in (("client", self.client), ("server", self.server)):
            if program.wait(20) != 0:
                return f"{name}: {program.outcome().verdict}: {last_output(program.outcome())}"
        return self._check_memory(group)

    def _sample(self):
        """Keeps the newest answer of `terrace stat`, because the server may have ended at the next query."""
        with contextlib.suppress(OSError, ValueError, LookupError, subprocess.SubprocessError):
            command = [str(procs.terrace_binary()), "stat", str(self.server.process.pid), "--json"]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            memory = json.loads(answer.stdout)["devices"][0]["memory"]
            if memory["regions"]:
                self.memory = memory

    def _misses(self):
        """The number of accesses to the file, by the newest answer."""
        regions = self.memory["regions"] if self.memory else []
        return sum(region["misses"] for region in regions)

    def _statistics(self):
        return f"`terrace stat` showed {self.memory}"

    def _check_memory(self, group):
        if not self.memory:
            return "no region was tiered to its file"
        if self._misses() == 0:
            return f"nothing was fetched from the file; {self._statistics()}"
        if self.memory["resident_bytes"] > DRAM_MIB * MIB:
            return f"more memory was in use than --dram allows; {self._statistics()}"
        peak = group.peak_bytes()
        if peak is not None and peak > LIMIT_MIB * MIB:
            return f"the server used {peak // MIB} MiB"
        return None


def _file(log_dir, mib=FILE_MIB):
    """A file that is not in the page cache."""
    path, generator = log_dir / "data.bin", random.Random(1)
    with open(path, "wb") as file:
        for _ in range(mib):
            file.write(generator.randbytes(MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def _perftest(tool, *options):
    def case(log_dir):
        # perftest's buffer is twice a message for each queue pair.
        path, port = _file(log_dir), procs.free_port()
        client = [tool, "-F", "-p", str(port), *options, procs.HOST]
        server = [tool, "-F", "-p", str(port), *options, "--odp", f"--mmap={path}"]
        try:
            served = TieredPair(log_dir, server, client, port)
            error = served.run()
        finally:
            path.unlink()
        rows = perftest.parse_table(served.client.outcome().out) if error is None else []
        return error or (None if len(rows) == 1 else f"{len(rows)} rows of results instead of 1")

    return case


def _file_region(log_dir):
    """The whole file arrives unchanged. Its size is a multiple of the memory budget."""
    path, port, go_file = _file(log_dir), str(procs.free_port()), log_dir / "go"
    # The client's output waits in a pipe until the server's misses were sampled: the whole transfer may take less time
    # than a sample.
    fetch = 'set -o pipefail; "$0" fetch -p "$1" "$2" | { until [ -e "$3" ]; do sleep 0.02; done; cat; }'
    client = ["bash", "-c", fetch, str(FILE_REGION), port, procs.HOST, str(go_file)]
    try:
        error = TieredPair(log_dir, [str(FILE_REGION), "serve", "--odp", "-p", port, str(path)], client, int(port),
                           go_file=go_file).run()
        if error:
            return error
        return None if filecmp.cmp(path, log_dir / "client.out", shallow=False) else "the data differs"
    finally:
        path.unlink()
        (log_dir / "client.out").unlink(missing_ok=True)
        go_file.unlink(missing_ok=True)


def _stress(seconds, *client_options):
    """The server's own stores and two queue pairs of a peer on the same pages, with memory churn; every byte is
    checked. `TERRACE_STRESS_SECONDS` overrides the duration, and `TERRACE_SEED` the seed of the layout."""
    seconds, seed = int(os.environ.get("TERRACE_STRESS_SECONDS", seconds)), os.environ.get("TERRACE_SEED", "1")

    def case(log_dir):
        path, port = log_dir / "data.bin", str(procs.free_port())
        server = [str(STRESS), "serve", "-p", port, "-m", str(FILE_MIB), "-s", seed, str(path)]
        client = [str(STRESS), "drive", "-p", port, "-t", str(seconds), procs.HOST]
        try:
            served = TieredPair(log_dir, server, client, int(port), CHURN, client_options)
            error = served.run(timeout_s=seconds + 120)
        finally:
            path.unlink(missing_ok=True)
        if error:
            return error
        evicted = sum(region["evictions"] for region in served.memory["regions"])
        return f"too little memory churn: {evicted} evicted pages" if evicted < 1000 else None

    return case


SPECIAL = {
    "paged/ib_read_bw": _perftest("ib_read_bw", "-s", str(64 * MIB), "-n", "20"),
    "paged/ib_read_bw-16-qps": _perftest("ib_read_bw", "-s", str(4 * MIB), "-q", "16", "-n", "40"),
    "paged/ib_write_bw": _perftest("ib_write_bw", "-s", str(64 * MIB), "-n", "20"),
    "paged/ib_read_lat": _perftest("ib_read_lat", "-s", str(64 * MIB), "-n", "20"),
    "paged/file-region": _file_region,
    "paged/stress": _stress(20),
    "paged/stress-under-faults": _stress(10, "--fault-plan", LOSSY_PLAN),
}
