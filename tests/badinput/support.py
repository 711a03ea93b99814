"""What the tests of this directory share: the command under test, addresses of their own, and endpoints to talk to.

`make test` runs them; after `make build badinput-programs`, `python3 -m unittest discover -s tests/badinput` does.
"""

import contextlib
import itertools
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from harness import procs  # noqa: E402

TERRACE = procs.terrace_binary()
PROGRAMS = pathlib.Path(os.environ.get("TERRACE_BADINPUT", ROOT / "build/badinput/programs"))
ANSWER_TIMEOUT_S = 20.0

# Statuses of completions (ibv_wc_status).
SUCCESS, LOC_LEN_ERR, LOC_PROT_ERR, WR_FLUSH_ERR = 0, 1, 4, 5
REM_INV_REQ_ERR, REM_ACCESS_ERR, REM_OP_ERR, RETRY_EXC_ERR, RNR_RETRY_EXC_ERR = 9, 10, 11, 12, 13
# States of queue pairs (ibv_qp_state).
RTS, ERR = 3, 6
# Access flags of regions.
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC, ON_DEMAND = 1, 2, 4, 8, 64
ALL = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC

# Exit status of a command that was called wrongly.
USAGE = 2

_numbers = itertools.count()


def fresh_address():
    """An address of the loopback that no other test uses, nor another run at the same time: a host of its own."""
    pid, number = os.getpid(), next(_numbers)
    assert number < 3 * 254
    return f"127.{64 * (number // 254 + 1) + (pid >> 8) % 64}.{pid % 256}.{number % 254 + 1}"


class Endpoint:
    """A running `endpoint` program; see programs/endpoint.c for what it understands."""

    def __init__(self, address, *options, wrapper=(), inner_wrapper=()):
        self.address = address
        self._errors = tempfile.TemporaryFile()
        program = [*inner_wrapper, str(PROGRAMS / "endpoint")]
        self.process = subprocess.Popen(
            [*wrapper, *procs.under_terrace(program, *options, addr=address)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0, start_new_session=True)
        self.pid = self.process.pid  # `terrace run` becomes the program
        self._pending = b""
        self.qpns = {}

    def __call__(self, *words, patience=ANSWER_TIMEOUT_S):
        """Gives a command and returns its answer: the values by name, or the words when they have none."""
        self.send(*words)
        return self.receive(patience)

    def send(self, *words):
        self.process.stdin.write((" ".join(str(word) for word in words) + "\n").encode())

    def receive(self, patience=ANSWER_TIMEOUT_S):
        answer = self._line(patience).split()
        if answer[0] == "errno":
            raise OSError(int(answer[1]), os.strerror(int(answer[1])))
        if answer[1:] and all("=" in word for word in answer[1:]):
            return {name: int(value) for name, value in (word.split("=") for word in answer[1:])}
        return answer[1:]

    def _line(self, patience):
        deadline = time.monotonic() + patience
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0))
            chunk = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not chunk:
                raise AssertionError(f"no answer from endpoint {self.address} ({self.fate()}): {self.complaints()}")
            self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        return line.decode()

    # ---- shorthands ----

    def mr(self, name, kind, size, access=ALL, *path):
        return self("mr", name, kind, size, access, *path)

    def qp(self, name, service="rc"):
        self.qpns[name] = self("qp", name, service)["qpn"]
        return self.qpns[name]

    def poll(self, name, count=1, patience=10.0):
        """Up to `count` completions as (id, status) pairs."""
        answer = self("poll", name, count, patience, patience=patience * count + ANSWER_TIMEOUT_S)
        return [tuple(int(field) for field in word.split(":")[:2]) for word in answer]

    def status(self, name, patience=10.0):
        """The status of the next completion."""
        (completion,) = self.poll(name, 1, patience)
        return completion[1]

    def stat(self):
        """What `terrace stat` shows of the first device."""
        output = subprocess.run([TERRACE, "stat", str(self.pid), "--json"], capture_output=True, text=True, timeout=10)
        if output.returncode != 0:
            raise AssertionError(output.stderr)
        return json.loads(output.stdout)[0]

    def counts(self, name):
        """The counters of one queue pair."""
        (pair,) = [pair for pair in self.stat()["queue_pairs"] if pair["qpn"] == self.qpns[name]]
        return pair["counts"]

    # ---- the end ----

    def fate(self):
        status = self.process.poll()
        return "running" if status is None else f"ended with {status}"

    def complaints(self):
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip() or "nothing on standard error"

    def kill(self):
        """As if the power went: nothing is said to anybody."""
        self.process.kill()
        self.process.wait()

    def stop(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._errors.close()


def connect(left, left_name, right, right_name, **attributes):
    """Makes a queue pair at each end, unless there are such, and brings both to RTS."""
    for end, name in ((left, left_name), (right, right_name)):
        if name not in end.qpns:
            end.qp(name)
    words = [f"{name}={value}" for name, value in attributes.items()]
    left("connect", left_name, right.address, right.qpns[right_name], *words)
    right("connect", right_name, left.address, left.qpns[left_name], *words)


def assert_refused(test, outcome, status, said):
    """The command has ended with that status and printed nothing but a complaint with that in it: one line, but for usage."""
    test.assertEqual(outcome.returncode, status, outcome.stderr)
    test.assertEqual(outcome.stdout, "")
    test.assertIn(said, outcome.stderr)
    if status != USAGE:
        test.assertTrue(outcome.stderr.startswith("terrace: "), outcome.stderr)
        test.assertEqual(outcome.stderr.count("\n"), 1, outcome.stderr)


class BadInput(unittest.TestCase):
    """A test case whose endpoints end with it."""

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        for needed in (TERRACE, PROGRAMS / "endpoint"):
            if not needed.exists():
                raise FileNotFoundError(f"{needed} is missing: run `make build badinput-programs` first")

    def start(self, address=None, *options, **keywords):
        """An endpoint with its device open."""
        end = Endpoint(address or fresh_address(), *options, **keywords)
        self.addCleanup(end.stop)
        end("open")
        return end

    def pair(self, size=65536, **attributes):
        """Two endpoints, each with a region "m" and a queue pair "q", connected. Returns them and both regions."""
        left, right = self.start(), self.start()
        regions = [end.mr("m", "anon", size) for end in (left, right)]
        connect(left, "q", right, "q", **attributes)
        return left, right, *regions

    def eventually(self, condition, what, patience=5.0):
        deadline = time.monotonic() + patience
        while not condition():
            if time.monotonic() > deadline:
                self.fail(f"{what}: not within {patience} s")
            time.sleep(0.02)
