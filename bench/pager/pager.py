#!/usr/bin/env python3
"""Measures programs whose memory does not fit: Terrace's pager, and what the kernel has.

    pager.py [--only PROGRAM] [--system SYSTEM] [--rounds N] [--out DIRECTORY] [--short] [--add]

Each program runs with all of its memory, and then with a part of it, by each system in turn; every program verifies its
results. Writes results.json, tables.md and a plot. Needs root. See README.md.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import typing

import postgres
import tables

ROOT = pathlib.Path(__file__).resolve().parents[2]
TERRACE = ROOT / "build/bin/terrace"
PROGRAMS = ROOT / "build/bench/pager"
MIB = 1 << 20
TIMEOUT = 300
SHARES = (75, 50)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextlib.contextmanager
def memory_node(scheme, user):
    """A memory node of this machine. Within the host, pages go to processes of the same user without packets."""
    address = f"127.0.0.1:{free_port()}"
    command = [*user, TERRACE, "memory-node", "--memory", "1G", "--listen", address, "--scheme", scheme]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if not node.stdout.readline().startswith("lending"):
            sys.exit("the memory node does not start")
        yield address
    finally:
        node.send_signal(signal.SIGTERM)
        node.wait()


class Far:
    """Memory beyond the share is on a memory node, or in a file."""

    def __init__(self, path, prefetch="on", scheme="odrp"):
        self.path, self.prefetch, self.scheme = path, prefetch, scheme

    @contextlib.contextmanager
    def limited(self, limit, user):
        with contextlib.ExitStack() as stack:
            where, path = f"file:{tempfile.gettempdir()}", []
            if self.path != "file":
                where = stack.enter_context(memory_node(self.scheme, user))
                # The pager's path. The node's chains access its own memory without packets in any case.
                path = ["--path", self.path]
            command = [*user, str(TERRACE), "run", "--remote-memory", where, "--local", str(limit), "--prefetch", self.prefetch]
            yield [*command, *path, "--"]


class Swap:
    """A memory cgroup with a limit, over a swap device of the kernel."""

    GROUP = pathlib.Path("/sys/fs/cgroup/memory/terrace-bench-pager")

    def __init__(self, device):
        self.device = device

    @contextlib.contextmanager
    def limited(self, limit, user):
        with self.device(), contextlib.ExitStack() as stack:
            self.GROUP.mkdir()
            stack.callback(self.GROUP.rmdir)
            (self.GROUP / "memory.swappiness").write_text("100")
            (self.GROUP / "memory.limit_in_bytes").write_text(str(limit))
            yield ["sh", "-c", f'echo $$ > {self.GROUP}/cgroup.procs && exec "$@"', "sh", *user]


@contextlib.contextmanager
def swap_file():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        path = pathlib.Path(directory) / "swap"
        path.touch(mode=0o600)
        subprocess.run(["fallocate", "--length", "1G", path], check=True)
        with swap_on(path):
            yield


@contextlib.contextmanager
def zram():
    size = pathlib.Path("/sys/block/zram0/disksize")
    if size.read_text().strip() != "0":
        raise OSError("/dev/zram0 is in use")
    size.write_text("1G")
    try:
        with swap_on(pathlib.Path("/dev/zram0")):
            yield
    finally:
        pathlib.Path("/sys/block/zram0/reset").write_text("1")


@contextlib.contextmanager
def swap_on(path):
    subprocess.run(["mkswap", path], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.run(["swapon", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["swapoff", path], check=True)


SYSTEMS = {
    "far, within the host": Far("auto"),
    "far, within the host, static": Far("auto", scheme="static"),
    "far, UDP": Far("udp"),
    "far, UDP, static": Far("udp", scheme="static"),
    "far, UDP, dynamic 1 MiB": Far("udp", scheme="dynamic-1m"),
    "far, UDP, dynamic 4 KiB": Far("udp", scheme="dynamic-4k"),
    "far, UDP, two-sided": Far("udp", scheme="two-sided"),
    "far, UDP, no prefetch": Far("udp", prefetch="off"),
    "far, file": Far("file"),
    "swap file": Swap(swap_file),
    "zram": Swap(zram),
}


class Watch:
    """The largest private memory of a process."""

    def __init__(self, pid):
        self.status, self.most = pathlib.Path(f"/proc/{pid}/status"), 0

    def look(self):
        with contextlib.suppress(OSError, TypeError):
            self.most = max(self.most, int(re.search(r"RssAnon:\s+(\d+)", self.status.read_text())[1]) * 1024)


def run(command):
    """Runs a program that prints an object, and returns it with the program's largest private memory."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watch, deadline = Watch(process.pid), time.monotonic() + TIMEOUT
    try:
        while process.poll() is None and time.monotonic() < deadline:
            watch.look()
            time.sleep(0.005)
    finally:
        process.kill()
        output = process.communicate()[0]
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command, output)
    return {**json.loads(output), "most_bytes": watch.most}


def batch(program, *arguments):
    return lambda prefix: run([*prefix, str(PROGRAMS / program), *map(str, arguments)])


def memcached(items, operations):
    """memcached with memory by the prefix; the client has all of its own."""

    def measure(prefix):
        with tempfile.TemporaryDirectory() as directory:
            path = f"{directory}/socket"
            server = subprocess.Popen([*prefix, "memcached", "-u", "root", "-m", "512", "-t", "1", "-s", path])
            watch = Watch(server.pid)
            try:
                deadline = time.monotonic() + 10
                while not os.path.exists(path) and time.monotonic() < deadline:
                    time.sleep(0.01)
                result = run([str(PROGRAMS / "etc"), path, str(items), str(operations)])
                watch.look()
                return {**result, "most_bytes": watch.most}
            finally:
                server.terminate()
                server.wait()

    return measure


class Program(typing.NamedTuple):
    """A program that is measured."""

    # Runs it under the words before its command, and returns what it has found.
    measure: typing.Callable
    # The words that make it another user's, if it does not run as root.
    user: tuple = ()


def programs(is_short):
    scale = 4 if is_short else 1
    return {
        "quicksort": Program(batch("quicksort", 128 // scale)),
        "k-means": Program(batch("kmeans", 256 // scale)),
        "memcached": Program(memcached(400_000 // scale, 300_000 // scale)),
        # Each of its dozen processes has some private memory that is never paged: with fewer keys that would be most of a half.
        "PostgreSQL": Program(postgres.measure(500_000 if is_short else 800_000, 2, 2, 1_000), postgres.AS_USER),
        "random touches": Program(batch("touches", 256 // scale, 40_000 // scale)),
    }


def read_latency(path):
    """p50 and p99 of a READ of 4 KiB, by perftest."""
    environment = {**os.environ, "TERRACE_PATH": path, "TERRACE_ADDR": "127.0.0.1"}
    command = [str(TERRACE), "run", "--", "ib_read_lat", "-s", "4096", "-n", "20000", "-F", "-p", str(free_port())]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        output = subprocess.run([*command, "127.0.0.1"], env=environment, check=True, capture_output=True, text=True, timeout=60)
    finally:
        server.kill()
        server.wait()
    line = next(line.split() for line in output.stdout.splitlines() if re.match(r"\s*4096\s", line))
    return {"p50_us": float(line[4]), "p99_us": float(line[7])}


def measure(options, results):
    if not results["reads"] or not options.only:
        for name, path in (("within the host", "auto"), ("UDP", "udp")):
            results["reads"][name] = read_latency(path)
            print(f"READ, {name}: {results['reads'][name]}", flush=True)
    for name, program in programs(options.short).items():
        if options.only and options.only not in name:
            continue
        found = results["programs"].setdefault(name, {})
        for _ in range(options.rounds):
            whole = program.measure([*program.user])
            print(f"{name}: {whole}", flush=True)
            found.setdefault("bytes", whole["most_bytes"])
            found.setdefault("all local", {}).setdefault("100", []).append(whole)
            systems = [system for system in SYSTEMS if options.system.search(system)]
            for system, share in ((system, share) for system in systems for share in SHARES):
                try:
                    with SYSTEMS[system].limited(found["bytes"] * share // 100, program.user) as prefix:
                        result = program.measure(prefix)
                # Wrong results are ValueErrors, as is an output that is not JSON.
                except (OSError, subprocess.SubprocessError, ValueError) as error:
                    result = {"error": str(error)}
                is_right = result.get("result") == whole["result"]
                found.setdefault(system, {}).setdefault(str(share), []).append({**result, "is_right": is_right})
                print(f"{name}, {system}, {share} %: {result}", flush=True)
                tables.write(results, options.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="programs whose names have this in them")
    parser.add_argument("--system", type=re.compile, default=re.compile(""), help="systems whose names match this expression")
    parser.add_argument("--add", action="store_true", help="add to the results that are in the directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="a quarter of the memory")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "results/bench-pager/latest")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("pager.py: run as root: it limits memory, and swaps")
    if not shutil.which("memcached") or not postgres.find("initdb"):
        sys.exit("pager.py: memcached or PostgreSQL is not installed")
    # The end undoes what is set up: swap devices, cgroups, memory nodes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    results = {"programs": {}, "reads": {}}
    if options.add and (options.out / "results.json").exists():
        results = json.loads((options.out / "results.json").read_text())
    measure(options, results)
    print((options.out / "tables.md").read_text())


if __name__ == "__main__":
    main()
