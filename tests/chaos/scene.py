"""The processes of the chaos tests: a node, a program and a listener that are attacked, and bystanders that use them meanwhile.

No process may crash or complain. Memory, descriptors and threads must stay bounded, and come back down. The bystanders must complete all
operations that they begin, without an error and with the right data. Their rate, compared with before, is only reported: it depends on the
machine.
"""

import contextlib
import multiprocessing
import os
import pathlib
import queue
import random
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/negative")]

import attacks  # noqa: E402
import bystanders  # noqa: E402
import roce  # noqa: E402
from harness import procs  # noqa: E402
from harness.endpoint import stat  # noqa: E402

MIB = 1 << 20
REGION, REGION_BYTES, DRAM_BYTES = "table", 64 * MIB, 8 * MIB
STREAM_SPAN, REQUESTS_SPAN = 24 * MIB, 16 * MIB
QUIET_S = 3
# An attacker checks its time limit between exchanges. On a busy machine an exchange takes long, because it waits for
# answers.
ATTACK_END_S = 90
# Bounds on the resources that attacks add to a process: less than the sum of the limits of SPECIFICATION.md.
MEMORY_MIB_MAX, MEMORY_MIB_LEFT_MAX, DESCRIPTORS_MAX, THREADS_MAX = 192, 64, 16, 4
# The listener uses four or five descriptors for each connection, and 20 connections come each second. A busy machine
# delays their end, so more are open at a time. The limit for descriptors at the end is DESCRIPTORS_MAX.
LISTENER_DESCRIPTORS_MAX = 60
# A node keeps the connections of vanished clients while there are few (docs/decisions/0023).
QUEUE_PAIRS_LEFT_MAX = 300
BACK_DOWN_S = 60
# Without CAP_SYS_NICE engines cannot raise their priority; attackers then lower theirs by as much (`engine/priority.rs`).
ATTACKERS_NICENESS = 10


def addresses():
    """Loopback addresses that no concurrent run uses."""
    pid = os.getpid()
    return (f"127.{48 + (pid >> 8) % 16}.{pid % 256}.{number}" for number in range(1, 255))


class Victim:
    """An attacked process, and its resource use."""

    def __init__(self, name, process, descriptors_max=DESCRIPTORS_MAX):
        self.name, self.process, self.pid, self.descriptors_max = name, process, process.pid, descriptors_max
        self.set_baseline()

    def set_baseline(self):
        """Records the current use as the baseline."""
        self.peak = self.before = self.use()

    def use(self):
        """Anonymous memory in MiB, descriptors, threads."""
        proc = pathlib.Path(f"/proc/{self.pid}")
        (anonymous,) = [line for line in (proc / "status").read_text().splitlines() if line.startswith("RssAnon:")]
        return int(anonymous.split()[1]) / 1024, len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))

    def sample(self):
        self.peak = tuple(max(pair) for pair in zip(self.peak, self.use()))

    def excess(self, use, limits):
        """One line for each figure beyond its limit."""
        kinds = ("MiB", "descriptors", "threads")
        return [f"{self.name}: {now:.0f} {kind}, {before:.0f} before" for now, before, limit, kind
                in zip(use, self.before, limits, kinds) if now > before + limit]


class Watch(threading.Thread):
    """Samples the victims' use every 50 ms."""

    def __init__(self, victims):
        super().__init__(daemon=True)
        self.victims, self.over = victims, threading.Event()

    def run(self):
        while not self.over.wait(0.05):
            # An ended process has no /proc entry.
            with contextlib.suppress(OSError, ValueError):
                for victim in self.victims:
                    victim.sample()


class Scene:
    """The victims, the bystanders, and their addresses."""

    def __init__(self, stack, fresh, log_dir):
        self.log_dir, self.failures = log_dir, []
        # Real attackers do not share processors with their victims. In this test they do, and must not get more time
        # than the engines.
        self.niceness = 0 if may_raise_priority() else ATTACKERS_NICENESS
        self.node_address = next(fresh)
        file = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "table.bin"
        frames = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        self.node = procs.Program(
            [procs.terrace_binary(), "serve", "--region", f"{REGION}={file}:{REGION_BYTES}", "--frames", frames, "--dram", DRAM_BYTES, "--listen",
             self.node_address], log_dir, "node")
        stack.callback(self.stop, self.node)
        procs.wait_until(lambda: "serving at" in self.node.paths[0].read_text(), "the node serves")
        self.program, client, other = (self.endpoint(stack, next(fresh)) for _ in range(3))
        verbs, seen = bystanders.stream_between("verbs to a program", client, self.program, "b", STREAM_SPAN)
        stream, seen_too = bystanders.stream_to_node("verbs to the node", other, self.node_address, REGION, 0, STREAM_SPAN)
        requester = bystanders.Requester("requests to the node", next(fresh), self.node_address, REGION, STREAM_SPAN, REQUESTS_SPAN)
        listener_address, port = next(fresh), procs.free_port()
        self.listener = procs.Program(
            procs.under_terrace(["rping", "-s", "-P", "-V", "-a", listener_address, "-p", str(port)], "--path", "auto", addr=listener_address),
            log_dir, "listener")
        stack.callback(self.stop, self.listener)
        procs.wait_until(lambda: procs.is_listening(port), "rping listens")
        caller = bystanders.Caller("connections", next(fresh), listener_address, port, log_dir)
        self.workers = [requester, caller]
        for worker in self.workers:
            worker.begin()
            stack.callback(worker.end)
        self.bystanders = [verbs, stream, *self.workers]
        self.targets = attacks.Targets(self.node_address, self.program.address, listener_address, seen + seen_too, bystanders.PSN,
                                       REGION, [next(fresh) for _ in range(9)])
        self.victims = [Victim("node", self.node.process), Victim("program", self.program.process),
                        Victim("listener", self.listener.process, LISTENER_DESCRIPTORS_MAX)]
        self.baseline_rates = self.work(QUIET_S)
        for victim in self.victims:
            victim.set_baseline()
        self.objects_before = stat(self.node.process.pid)["objects"]
        self.watch = Watch(self.victims)
        self.watch.start()

    def fail(self, why):
        """Records a failure for the test under way."""
        self.failures.append(why)

    def new_failures(self):
        """The failures since the last call."""
        failures, self.failures = self.failures, []
        return failures

    def endpoint(self, stack, address):
        end = bystanders.endpoint(address)
        stack.callback(self.stop, end)
        return end

    def stop(self, process):
        """Stops the process; an unexpected end is a failure."""
        try:
            process.stop()
        except procs.UnexpectedEnd as end:
            self.fail(str(end))

    def open_to_attackers(self):
        """Connects the program to two attackers, and posts a WRITE to each."""
        self.program.mr("bait", "anon", MIB)
        for number, address in enumerate(self.targets.attackers[5:7]):
            name = f"a{number}-{time.monotonic_ns() % 1000000}"
            qpn = self.program.qp(name)
            self.program("connect", name, address, 0x123, f"sq_psn={bystanders.PSN}", f"rq_psn={bystanders.PSN}")
            self.program("post", name, "write", 1, "bait", 0, 64, 0x1000, 0x77)
            self.targets.opened[address] = (qpn, bystanders.PSN)

    def work(self, seconds):
        """Runs the bystanders. Returns the operations per second of each."""
        started = time.monotonic()
        for bystander in self.bystanders:
            bystander.start()
        time.sleep(seconds)
        rates = {}
        for bystander in self.bystanders:
            try:
                rates[bystander.name] = bystander.stop() / (time.monotonic() - started)
            except (bystanders.Failure, AssertionError, OSError) as error:
                self.fail(str(error))
                rates[bystander.name] = 0
        return rates

    def expect_victims_run(self):
        for victim in self.victims:
            if victim.process.poll() is not None:
                self.fail(f"{victim.name} has ended with {victim.process.returncode}")
            for line in victim.excess(victim.peak, (MEMORY_MIB_MAX, victim.descriptors_max, THREADS_MAX)):
                self.fail(line)

    def expect_new_client(self):
        """A new client can connect to the node."""
        peer = roce.Peer(self.targets.attackers[7])
        try:
            qpn, psn = random.randrange(2, 1 << 16), random.randrange(1 << 24)
            bystanders.ControlClient(peer, self.node_address, qpn, psn=psn).find(REGION)
        except bystanders.NoAnswer:
            self.fail("the node accepts no new clients")
        finally:
            peer.close()


def may_raise_priority():
    """Whether threads may raise their priority, like an engine with a packet backlog."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -1)
    except PermissionError:
        return False
    os.setpriority(os.PRIO_PROCESS, 0, 0)
    return True


def attack(scene, chosen, seconds):
    """Runs attacks side by side while the bystanders work. Returns the bystanders' rates and the attackers' reports."""
    context = multiprocessing.get_context("fork")
    reports = [context.Queue() for _ in chosen]
    if {attacks.endless_rnr_naks, attacks.unsolicited_packets} & set(chosen):
        scene.open_to_attackers()
    processes = [context.Process(target=attacks.run, args=(one, scene.targets, seconds, report, scene.niceness), daemon=True)
                 for one, report in zip(chosen, reports)]
    for process in processes:
        process.start()
    rates = scene.work(seconds)
    reports = []
    for process, report in zip(processes, reports):
        try:
            reports.append(report.get(timeout=ATTACK_END_S))
        except queue.Empty:
            reports.append("no report")
            scene.fail("an attack did not end in time")
        process.terminate()
        process.join()
    scene.expect_victims_run()
    scene.expect_new_client()
    return rates, reports


def expect_resources_freed(scene):
    """The resources that attackers used are freed after the attackers have ended."""
    limits = (MEMORY_MIB_LEFT_MAX, DESCRIPTORS_MAX, THREADS_MAX)
    deadline = time.monotonic() + BACK_DOWN_S
    while True:
        # Traffic of working clients makes the node check for vanished clients.
        scene.work(0.2)
        pairs = stat(scene.node.process.pid)["objects"]["queue_pairs"] - scene.objects_before["queue_pairs"]
        left = [line for victim in scene.victims for line in victim.excess(victim.use(), limits)]
        left += [f"node: {pairs} more queue pairs than before"] if pairs > QUEUE_PAIRS_LEFT_MAX else []
        if not left:
            return
        if time.monotonic() > deadline:
            for line in left:
                scene.fail(line)
            return
        time.sleep(1)


def shares(scene, rates):
    """The bystanders' rates, each as a share of its rate without attacks."""
    return {name: f"{rate / scene.baseline_rates[name]:.2f}" if scene.baseline_rates[name] else "0" for name, rate in rates.items()}


def resource_use(scene):
    """A line for each victim: anonymous MiB, descriptors and threads before the attacks, at most, and now."""
    for victim in scene.victims:
        uses = [f"{use[0]:.0f}, {use[1]}, {use[2]}" for use in (victim.before, victim.peak, victim.use())]
        yield f"{victim.name}: {uses[0]} before; at most {uses[1]}; {uses[2]} after"
