"""The processes of the endurance test: how each kind is started, controlled and ended, and how their figures are
read."""

import contextlib
import json
import os
import pathlib
import select
import subprocess
import tempfile
import time

from harness import procs
from harness.endpoint import Endpoint

WORKER = procs.ROOT / "build/endurance/programs/worker"
CLIENT = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or procs.ROOT / "target") / "release/examples/endurance_client"
FIRST_PORT = 4791
START_TIMEOUT_S = 30
END_TIMEOUT_S = 90
# Limit for the end of a link's load: requests to a killed peer are retried for seconds.
DRAIN_TIMEOUT_S = 80

PLAN = """# Seed {seed} of an endurance run.
seed = {seed}
loss = 0.005
duplicate = 0.005
corrupt = 0.002
reorder = 0.005
delay_us_max = 50
"""


class Stuck(Exception):
    """A process or a link is stuck or has failed."""


def fault_plan(directory, seed):
    """A file with faults of every kind."""
    path = pathlib.Path(directory) / f"plan-{seed}.toml"
    path.write_text(PLAN.format(seed=seed))
    return path


def figures(pid):
    """The figures of a process from the kernel and `terrace stat`; None if it has ended."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, LookupError):
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        command = [str(procs.terrace_binary()), "stat", str(pid), "--json"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        device = json.loads(shown.stdout)["devices"][0]
        return {
            "anonymous_kib": int(status["RssAnon"].split()[0]),
            "resident_kib": int(status["VmRSS"].split()[0]),
            "threads": own_threads(pid),
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "device": device,
        }
    return None


def own_threads(pid):
    """The threads of a process, without the io_uring workers that the kernel starts and ends by itself."""
    names = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        # A thread that has ended meanwhile is not counted.
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text())
    return sum(not name.startswith("iou-wrk-") for name in names)


def ports_in_use(address):
    """UDP ports of the address: one for each instance index in use."""
    bytes_of = bytes(int(part) for part in address.split("."))[::-1].hex().upper()
    with open("/proc/net/udp") as lines:
        locals_ = [line.split()[1].split(":") for line in lines if ":" in line.split()[1]]
    return sorted(int(port, 16) for host, port in locals_ if host == bytes_of)


class Worker(Endpoint):
    """A verbs program with links to other workers."""

    def __init__(self, name, address, seed, plan, pause_us, dram_file=None, events=False):
        self.name, self.links = name, {}
        options = ["--fault-plan", str(plan)] if plan else []
        options += ["--dram", "4M"] if dram_file else []
        program = [WORKER, "-p", pause_us, "-s", seed, *(["-e"] if events else [])]
        super().__init__(address, *options, program=program)
        self("open", *([dram_file] if dram_file else []), timeout_s=START_TIMEOUT_S)

    def report(self):
        return self("report")

    def quiesce(self, command, link):
        """Ends the load of a link by `drain` or `error`, and waits for its outstanding requests."""
        self.send(command, link)
        answer = self._line(DRAIN_TIMEOUT_S)
        if answer != "ok":
            raise Stuck(f"{self.name}: link {link}: {answer} at `{command}`")


class Node:
    """A memory node."""

    name = "node"

    def __init__(self, address, path, frames, mib, dram):
        argv = [str(procs.terrace_binary()), "serve", "--listen", address, "--region", f"data={path}:{mib}M", "--dram", dram,
                "--frames", frames]
        self._errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        self.pid = self.process.pid
        line = self.process.stdout.readline()
        if "UDP port " not in line:
            raise Stuck(f"the node does not serve: {self.error_output()}")
        self.instance = int(line.split("UDP port ")[1].split(")")[0]) - FIRST_PORT

    def error_output(self):
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def stop(self):
        self.process.terminate()
        if self.process.wait(END_TIMEOUT_S) != 0:
            raise Stuck(f"the node ended with {self.process.returncode}: {self.error_output()}")


class Client:
    """A client of the node with exclusive use of a part of its region."""

    def __init__(self, name, node, address, first_byte, size, seed, plan):
        self.name, self._pending, self._said = name, b"", {}
        argv = [str(CLIENT), address, str(node.instance), "data", str(first_byte), str(size), str(seed), *([str(plan)] if plan else [])]
        self._errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0)
        self.pid = self.process.pid
        os.set_blocking(self.process.stdout.fileno(), False)
        self.heard = time.monotonic()

    def report(self):
        """The newest report of the client, without waiting for one."""
        while select.select([self.process.stdout], [], [], 0)[0]:
            chunk = self.process.stdout.read(65536)
            if not chunk:
                break
            self._pending += chunk
        *lines, self._pending = self._pending.split(b"\n")
        if lines:
            self._said = {name: int(value) for name, value in (word.split("=") for word in lines[-1].decode().split())}
            self.heard = time.monotonic()
        if time.monotonic() - self.heard > START_TIMEOUT_S:
            raise Stuck(f"{self.name} has said nothing for {START_TIMEOUT_S} s: {self.error_output()}")
        return self._said

    def error_output(self):
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def stop(self):
        """Closes the client's input. The client finishes its outstanding requests and exits."""
        self.process.stdin.close()
        if self.process.wait(END_TIMEOUT_S) != 0:
            raise Stuck(f"{self.name} ended with {self.process.returncode}: {self.error_output()}")
