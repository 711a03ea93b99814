#!/usr/bin/env python3
"""Eight processes under mixed load for as long as you like: `make endurance MINUTES=30`.

A memory node with a region larger than its memory, two clients of it, and five verbs programs (one of them with a region larger
than memory, too) that are linked to each other. Links come and go, some of them are cut with requests under way; faults are
injected into what most of the processes send; some processes are killed and replaced. Each process checks every
byte that it reads, every request must end, and the processes that stay (the node, a client, two of the verbs programs)
must not grow.

Ends with a summary, and with status 0 if all of that was so.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "scripts")]

from harness import procs  # noqa: E402
from harness.endpoint import RETRY_EXC_ERR, SUCCESS, WR_FLUSH_ERR  # noqa: E402
from processes import Client, Node, Stuck, Worker, fault_plan, figures, ports_in_use  # noqa: E402

MIB = 1 << 20
REGION_MIB, CLIENT_MIB = 96, 16
LINKS_MAX = 16
MTU_1024, MTU_4096 = 3, 5  # ibv_mtu
LINKS_WANTED = 6  # for each worker
TICK_S, SAMPLE_S, KILL_S = 0.25, 2.0, 6.0
OLDEST_MS_MAX = 30_000
# Allowed growth of memory between early and late samples: allocators keep varying amounts.
GROWTH_RATIO, GROWTH_KIB = 1.05, 2048
# A node keeps the state of killed clients until there are 512 of them (decision 23): the state of one client.
DEAD_CLIENT_KIB = 1 << 10
# With more runnable threads per processor than this, a process may wait for a processor longer than its peers' retries
# last.
STARVED_LOAD = 3.0
# Connections that may be lost for this reason: one, and one more per period of this length. The peers' retries take
# seconds. If processes wait that long repeatedly, either the machine is too busy for a valid run, or Terrace loses the
# connections.
STARVED_EVERY_S = 300
WORKERS = ("verbs-0", "verbs-paged", "verbs-2", "verbs-3", "verbs-4")
CLIENTS = ("client-0", "client-1")
STAYING = ("node", "client-0", "verbs-0", "verbs-paged")
MORTAL = ("client-1", "verbs-2", "verbs-3", "verbs-4")


class Run:
    """One run: its processes, and their samples."""

    def __init__(self, directory, frames, address, seconds, seed, pause_us):
        self.frames = frames
        self.directory, self.address, self.seconds = pathlib.Path(directory), address, seconds
        self.pause_us = pause_us
        self.random = random.Random(seed)
        self.started = time.monotonic()
        self.counts = collections.Counter()
        self.ended = collections.Counter()  # the counts of ended processes
        self.failures = []
        self.samples = collections.defaultdict(list)  # by name: (seconds, figures without the device)
        self.pairs = {}  # by process and queue pair: its counters, as last seen
        self.ports = {}  # by process: the port's counters, as last seen
        self.slowest_ms = 0
        self.client_deaths = []  # seconds since the start
        self.reports = {}  # by name: each process's counts, as last reported
        self.processes = {}

    # ---- processes ----

    def make(self, name):
        seed = self.random.randrange(1, 1 << 31)
        plan = fault_plan(self.directory, seed) if name not in ("node", "verbs-0") else None
        self.counts["processes"] += 1
        if name == "node":
            return Node(self.address, self.directory / "region", self.frames, REGION_MIB, "24M")
        if name in CLIENTS:
            first_byte = CLIENTS.index(name) * (REGION_MIB // 2) * MIB + 4096 * 3 + 40
            return Client(name, self.processes["node"], self.address, first_byte, CLIENT_MIB * MIB, seed, plan)
        dram_file = self.directory / "paged" if name == "verbs-paged" else None
        return Worker(name, self.address, seed, plan, self.pause_us, dram_file, events=WORKERS.index(name) % 2 == 0)

    @property
    def workers(self):
        return [self.processes[name] for name in WORKERS]

    def kill(self, name):
        """Kills a process in the middle of its work; its peers must detect that. A new process replaces it."""
        victim = self.processes[name]
        self.record_report(victim)
        self.counts["kills"] += 1
        for key, value in self.reports.pop(name, {}).items():
            self.ended[key] += value
        victim.kill()
        if name in CLIENTS:
            self.client_deaths.append(time.monotonic() - self.started)
        if name in WORKERS:
            for link, (peer, peer_link) in list(victim.links.items()):
                if peer is victim:
                    continue
                peer.quiesce("drain", peer_link)
                self.finish(peer, peer_link, (SUCCESS, RETRY_EXC_ERR))
            victim.stop()
        self.processes[name] = self.make(name)

    def was_starved(self, process):
        """Whether a client has lost its connection on an overloaded machine."""
        return "RetryExceeded" in process.error_output() and os.getloadavg()[0] > STARVED_LOAD * os.cpu_count()

    def replace_starved(self, name):
        self.counts["connections lost while starved"] += 1
        for key, value in self.reports.pop(name, {}).items():
            self.ended[key] += value
        self.client_deaths.append(time.monotonic() - self.started)
        self.processes[name] = self.make(name)
        return self.processes[name]

    # ---- links ----

    def link(self):
        """Makes a link between two workers with few links; both may be the same worker."""
        fewest = sorted(self.workers, key=lambda worker: (len(worker.links), self.random.random()))
        self.connect(fewest[0], self.random.choice(fewest[:3]))

    def connect(self, left, right):
        """Makes a link between these two, if both have a free number."""
        free = [[number for number in range(LINKS_MAX) if number not in worker.links] for worker in (left, right)]
        if not free[0] or len(free[1]) < 2:
            return
        ends = [(left, free[0][0]), (right, free[1][1] if left is right else free[1][0])]
        made = [worker("create", link) for worker, link in ends]
        mtu = self.random.choice((MTU_1024, MTU_4096))
        for (worker, link), about in zip(ends, reversed(made)):
            worker("connect", link, about["qpn"], about["addr"], about["rkey"], mtu)
        for (worker, link), peer in zip(ends, reversed(ends)):
            worker("start", link)
            worker.links[link] = peer
        self.counts["queue pairs"] += 2

    def unlink(self):
        """Ends a link, either idle or with requests outstanding."""
        ends = [(worker, link) for worker in self.workers for link in worker.links]
        if not ends:
            return
        worker, link = self.random.choice(ends)
        peer, peer_link = worker.links[link]
        is_failed = self.random.random() < 0.3
        worker.quiesce("error" if is_failed else "drain", link)
        peer.quiesce("drain", peer_link)
        self.counts["links set to the error state"] += is_failed
        self.finish(worker, link, (SUCCESS, WR_FLUSH_ERR) if is_failed else (SUCCESS,))
        self.finish(peer, peer_link, (SUCCESS, RETRY_EXC_ERR) if is_failed else (SUCCESS,))

    def finish(self, worker, link, expected):
        done = worker("destroy", link)
        del worker.links[link]
        if done["status"] not in expected:
            self.failures.append(f"{worker.name}: a link ended with status {done['status']}")
        if done["ops"] == 0 and done["status"] == SUCCESS:
            self.counts["links without an operation"] += 1

    # ---- samples ----

    def record_report(self, process):
        if process.name == "node":
            return
        report = process.report()
        if report.get("oldest_ms", 0) > OLDEST_MS_MAX:
            raise Stuck(f"{process.name}: a request is under way for {report['oldest_ms']} ms")
        self.slowest_ms = max(self.slowest_ms, report.get("slowest_ms", 0))
        self.reports[process.name] = {key: report.get(key, 0) for key in ("ops", "bytes", "received", "wrong")}

    def sample(self):
        now = time.monotonic() - self.started
        for name, process in list(self.processes.items()):
            if process.process.poll() is not None and name in CLIENTS and self.was_starved(process):
                process = self.replace_starved(name)
            if process.process.poll() is not None:
                raise Stuck(f"{name} has ended with {process.process.returncode}: {process.error_output()}")
            self.record_report(process)
            seen = figures(process.pid)
            if seen is None:
                self.counts["samples without an answer"] += 1
                continue
            device = seen.pop("device")
            self.samples[name].append((now, seen))
            self.ports[process.pid] = device["port"]
            for pair in device["queue_pairs"]:
                self.pairs[process.pid, pair["qpn"]] = pair["counts"]
        instances = len(ports_in_use(self.address))
        self.counts["most instance indexes in use"] = max(self.counts["most instance indexes in use"], instances)
        self.samples["instances"].append((now, {"instances": instances}))

    # ---- the run ----

    def run(self):
        for name in ("node", *CLIENTS, *WORKERS):
            self.processes[name] = self.make(name)
        # Only this worker has no fault plan. Its first link to itself uses the same-host path, which keeps descriptors. They
        # are opened now, not at a random time.
        self.connect(self.workers[0], self.workers[0])
        deadline = self.started + self.seconds
        sample_at = kill_at = time.monotonic()
        kill_at += KILL_S
        while time.monotonic() < deadline:
            if sum(len(worker.links) for worker in self.workers) < LINKS_WANTED * len(WORKERS):
                self.link()
            else:
                self.unlink()
            if time.monotonic() >= kill_at:
                self.kill(self.random.choice(MORTAL))
                kill_at = time.monotonic() + KILL_S
            if time.monotonic() >= sample_at:
                self.sample()
                sample_at = time.monotonic() + SAMPLE_S
            time.sleep(TICK_S)
        self.sample()

    def shut_down(self):
        """Ends all links and processes in order; no object and no port may be left."""
        while any(worker.links for worker in self.workers):
            self.unlink()
        for worker in self.workers:
            self.record_report(worker)
            objects = worker.stat()["objects"]
            left = {what: objects[what] for what in ("queue_pairs", "memory_regions", "completion_queues")}
            if left != {"queue_pairs": 0, "memory_regions": 1, "completion_queues": 1}:
                self.failures.append(f"{worker.name} still has {left}")
        for name in (*CLIENTS, *WORKERS, "node"):
            process = self.processes[name]
            process.stop()
            self.record_last_output(process)
        left = ports_in_use(self.address)
        if left:
            self.failures.append(f"UDP ports {left} are still in use")

    def record_last_output(self, process):
        if isinstance(process, Client):
            self.record_report(process)
        said = process.error_output() if not isinstance(process, Worker) else ""
        if said:
            self.failures.append(f"{process.name} said: {said}")

    def abandon(self):
        for process in self.processes.values():
            process.process.kill()

    # ---- results ----

    def window(self, name, figure, begin, end):
        values = [seen[figure] for at, seen in self.samples[name] if begin <= at / self.seconds <= end]
        return statistics.median(values) if values else None

    def growth(self):
        """Each early and late figure of the permanent processes."""
        rows = []
        for name, names in [*((name, ("anonymous_kib", "descriptors", "threads")) for name in STAYING), ("instances", ("instances",))]:
            for figure in names:
                early, late = self.window(name, figure, 0.2, 0.4), self.window(name, figure, 0.8, 1.1)
                if early is None or late is None:
                    self.failures.append(f"{name}: too few samples of {figure}")
                    continue
                most = early * GROWTH_RATIO + GROWTH_KIB if figure == "anonymous_kib" else early + 1
                if (name, figure) == ("node", "anonymous_kib"):
                    most += DEAD_CLIENT_KIB * sum(at > 0.2 * self.seconds for at in self.client_deaths)
                if late > most:
                    self.failures.append(f"{name}: {figure} has grown from {early} to {late}")
                rows.append({"process": name, "figure": figure, "early": early, "late": late})
        return rows

    def summary(self):
        totals = collections.Counter(self.ended)
        for report in self.reports.values():
            totals.update(report)
        if totals["wrong"]:
            self.failures.append(f"{totals['wrong']} checks found wrong data")
        starved, starved_max = self.counts["connections lost while starved"], 1 + int(self.seconds // STARVED_EVERY_S)
        if starved > starved_max:
            self.failures.append(f"{starved} connections were lost while starved, more than {starved_max}")
        growth = self.growth()
        over_pairs = lambda name: sum(counts[name] for counts in self.pairs.values())  # noqa: E731
        over_ports = lambda name: sum(counts.get(name, 0) for counts in self.ports.values())  # noqa: E731
        resident = max((seen["resident_kib"] for name in self.processes for _, seen in self.samples[name]), default=0)
        return {
            "minutes": round((time.monotonic() - self.started) / 60, 2),
            "operations": totals["ops"],
            "bytes": totals["bytes"],
            "messages_received": totals["received"],
            "wrong": totals["wrong"],
            **{name.replace(" ", "_"): count for name, count in self.counts.items()},
            "slowest_operation_ms": self.slowest_ms,
            "largest_resident_mib": resident // 1024,
            # The counts are those of the samples, without a queue pair's counts after its last sample.
            "packets_sent": over_ports("tx_packets"),
            "bad_icrc": over_ports("bad_icrc"),
            **{name: over_pairs(name) for name in ("retransmits", "timeouts", "duplicates", "sequence_naks_sent", "rnr_naks_sent")},
            "growth": growth,
            "failures": self.failures,
        }


def show(summary):
    for name, value in summary.items():
        if name not in ("growth", "failures"):
            print(f"  {name.replace('_', ' '):<28} {value:>16,}")
    print("\n  what stays, early and late (medians)")
    for row in summary["growth"]:
        print(f"  {row['process']:<14} {row['figure']:<14} {row['early']:>10,.0f} {row['late']:>10,.0f}")
    for failure in summary["failures"]:
        print(f"  FAILED: {failure}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--addr", default="127.0.42.1", help="the address of all processes (default 127.0.42.1)")
    parser.add_argument("--pause-us", type=int, default=1000, help="pause between two polls of a verbs program (default 1000)")
    options = parser.parse_args()
    procs.exit_on_signals()
    print(f"endurance: {options.minutes:g} minutes, seed {options.seed}", flush=True)
    if ports_in_use(options.addr):
        sys.exit(f"endurance: another process uses {options.addr}")
    with (
        tempfile.TemporaryDirectory(prefix="terrace-endurance-", dir=procs.ROOT) as directory,
        tempfile.TemporaryDirectory(prefix="terrace-endurance-", dir="/dev/shm") as frames,
    ):
        run = Run(directory, frames, options.addr, options.minutes * 60, options.seed, options.pause_us)
        try:
            run.run()
            run.shut_down()
        except (Stuck, AssertionError, OSError) as error:
            run.failures.append(f"{type(error).__name__}: {error}")
        finally:
            run.abandon()
        summary = run.summary()
    out = procs.new_run_dir("endurance")
    (out / "summary.json").write_text(json.dumps({"seed": options.seed, **summary}, indent=1) + "\n")
    (out / "samples.json").write_text(json.dumps(run.samples) + "\n")
    show(summary)
    print(f"numbers in {out}")
    return 1 if summary["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
