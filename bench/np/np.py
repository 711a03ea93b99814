#!/usr/bin/env python3
"""Measures what unmodified programs pay for memory that is not pinned, in the manner of NP-RDMA's evaluation (figures 1 and 7 to 10, tables
1 and 2).

The same two programs (bench/np/*.c) run in five modes. All modes of a section run at the same time and take turns of 15 ms to 60 ms, so
that other load meets all of them; the servers are on one processor, the clients on the other:

    pin      without --dram: ordinary memory, which the NIC never pages
    terrace  --dram: private memory that is paged to a swap file, and Terrace's NIC, which waits for absent pages
    np       --dram --nic commodity at both ends: NP-RDMA, on a model of a NIC that knows nothing of absent pages
    np-user  np with TERRACE_NP_ACCESS=two-sided: each request goes through the peer's software, with a registration at either end
    odp      --dram --mode odp: a model of hardware with on-demand paging, over a shared file mapping, because it pages files only

Writes a JSON file for each section and transport, tables.md and plots to results/bench-np/ or to --out, where the tables are of all files
that are there. Exit status 0 if every threshold is met.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "peers"), str(HERE.parents[1] / "scripts")]

import bench  # noqa: E402
import tables  # noqa: E402
from harness import procs  # noqa: E402
from sections import SECTIONS  # noqa: E402

NP = procs.ROOT / "build/bench/np/np"
CLIENT_CPU, SERVER_CPU = "0", "1"
STEADY_S, TIMEOUT_S = 0.4, 120


def main():
    options = parse_options()
    procs.exit_on_signals()
    bench.warn_if_busy()
    out = options.out or procs.new_run_dir("bench-np")
    out.mkdir(parents=True, exist_ok=True)
    for section in SECTIONS:
        for path in section.paths:
            if options.only in section.name and path in (options.path or path, "none"):
                bench.progress(f"{section.name}, {path} ...")
                load = os.getloadavg()[0]
                with tempfile.TemporaryDirectory(prefix="terrace-np-", dir=options.directory) as directory:
                    points = list(measure(section, path, pathlib.Path(directory)))
                document = {
                    "command": " ".join(["bench/np/np.py", *sys.argv[1:]]), "machine": bench.machine(), "load_before": load,
                    "section": section.name, "figures": section.figures, "path": path, "points": points,
                }
                (out / f"{section.name}-{path}.json").write_text(json.dumps(document) + "\n")
    page, documents, bars = tables.write(out)
    print(json.dumps(documents, indent=1) if options.json else f"{page}\nnumbers and plots in {out}")
    return 0 if all(bar.is_met for bar in bars) else 1


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"only sections whose names contain this word: {', '.join(section.name for section in SECTIONS)}")
    parser.add_argument("--path", choices=("udp", "local"), help="only this transport")
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("/var/tmp"), help="a directory on the disk (default /var/tmp)")
    parser.add_argument("--out", type=pathlib.Path, help="directory of the results (default results/bench-np/TIME)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


def measure(section, path, directory):
    if section.test:
        with Turns(section, path, directory) as turns:
            yield from turns.run()
        return
    for case in section.cases:
        options = case.mode.options_for(section, directory)
        for size, content in section.regions or [(0, "")]:
            argv = ("register", size, content) if section.regions else ("control",)
            outcome = procs.run_one(argv_of(CLIENT_CPU, argv, options), directory, "np", TIMEOUT_S, case.mode.env)
            yield from ({**row, **({"op": content, "size": size} if content else {})} for row in rows_of(outcome, case.name))


def argv_of(cpu, arguments, options=None):
    """Runs `np`; under Terrace if there are options for it, even none."""
    argv = [str(NP), *map(str, arguments)]
    return ["taskset", "-c", cpu, *(argv if options is None else procs.under_terrace(argv, *map(str, options)))]


def rows_of(outcome, name):
    if outcome.status != 0:
        sys.exit(f"bench: {' '.join(outcome.argv)}: {outcome.verdict}: {outcome.err.strip()}")
    rows = (json.loads(line) for line in outcome.out.splitlines())
    return [{"case": name, "op": name, "size": 0, **row} for row in rows if "ready" not in row]


class Turns:
    """The servers and clients of a section, which take turns: each client waits for a byte in its pipe, and writes one to the next one's."""

    def __init__(self, section, path, directory):
        self.section, self.path, self.directory = section, path, directory
        self.servers, self.clients = [], []
        self.names = [*(["disk"] if section.disk_turns else []), *(case.name for case in section.cases)]
        self.pipes = [directory / f"turn-{index}" for index in range(len(self.names))]
        for pipe in self.pipes:
            os.mkfifo(pipe)
        self.descriptors = [os.open(pipe, os.O_RDWR) for pipe in self.pipes]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # A client that did not end is late only because another one has failed.
        procs.stop_all(self.clients, are_late=True)
        procs.stop_all(self.servers)
        for descriptor in self.descriptors:
            os.close(descriptor)

    def run(self):
        self.servers = [self.start_server(index, case) for index, case in enumerate(self.section.cases)]
        for index, server in enumerate(self.servers):
            procs.wait_until(self.socket(index).exists, "the server's socket", TIMEOUT_S)
            wait_until_steady(server.process.pid)
        before = [counters(server.process.pid) for server in self.servers]
        self.start_clients()
        for client in self.clients:
            procs.wait_until(lambda: '"ready"' in client.paths[0].read_text() or self.has_failed(), "a client", TIMEOUT_S)  # noqa: B023
        os.write(self.descriptors[0], b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while any(client.process.poll() is None for client in self.clients) and not self.has_failed() and time.monotonic() < deadline:
            time.sleep(0.2)
        for client in self.clients:
            client.wait(0.1)
        # The one that has failed first; the others wait for it.
        outcomes = sorted(zip(self.names, self.clients), key=lambda pair: not pair[1].process.returncode)
        found = {name: rows_of(client.outcome(client.process.poll() is None), name) for name, client in outcomes}
        for name in self.names:
            yield from found[name]
        for case, server, old in zip(self.section.cases, self.servers, before):
            new = counters(server.process.pid)
            if new:
                yield {"case": case.name, "op": "counters", "size": 0, **{name: new[name] - old[name] for name in new}}

    def has_failed(self):
        return any(client.process.poll() for client in self.clients)

    def socket(self, index):
        return self.directory / f"socket-{index}"

    def options_of(self, index, case):
        own = self.directory / str(index)
        own.mkdir(exist_ok=True)
        plan = ("--fault-plan", HERE / self.section.fault_plan) if self.section.fault_plan else ()
        return own, ("--path", self.path, *plan, *case.mode.options_for(self.section, own))

    def start_server(self, index, case):
        own, options = self.options_of(index, case)
        region = (self.section.region_bytes, case.content, *case.mode.file_of(own))
        argv = argv_of(SERVER_CPU, ("server", self.socket(index), *region), options)
        return procs.Program(argv, own, "server", case.mode.env)

    def start_clients(self):
        pipes = list(zip(self.pipes, self.pipes[1:] + self.pipes[:1]))
        if self.section.disk_turns:
            disk = ("disk", self.directory / "disk", self.section.region_bytes, CLIENT_CPU, self.section.disk_turns, *pipes.pop(0))
            self.clients.append(procs.Program(argv_of(SERVER_CPU, disk), self.directory, "disk"))
        for index, (case, turns) in enumerate(zip(self.section.cases, pipes)):
            own, options = self.options_of(index, case)
            argv = argv_of(CLIENT_CPU, ("client", self.socket(index), self.section.test, *turns), options)
            self.clients.append(procs.Program(argv, own, "client", case.mode.env))


def counters(pid):
    """The counters of the server's region, if it is paged."""
    shown = subprocess.run([procs.terrace_binary(), "stat", str(pid), "--json"], capture_output=True, text=True, timeout=10)
    devices = json.loads(shown.stdout)["devices"]
    regions = [region for device in devices for region in (device.get("memory") or {}).get("regions", ())]
    names = ("hits", "misses", "pages_read", "evictions")
    return {name: sum(region[name] for region in regions) for name in names} if regions else {}


def wait_until_steady(pid):
    """Returns when no page of the region comes or leaves any more: what was filled before the registration is beyond the budget."""
    last, since = None, time.monotonic()
    deadline = since + TIMEOUT_S
    while time.monotonic() - since < STEADY_S and time.monotonic() < deadline:
        time.sleep(0.05)
        found = counters(pid)
        if not found:
            return
        if found != last:
            last, since = found, time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
