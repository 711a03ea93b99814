"""The program `endpoint` (tests/negative/programs/endpoint.c): one end of RDMA connections, controlled by lines of
text.

Tests connect such ends with each other, or with a peer of the test. An end is a process of this machine under `terrace
run`, or another program that takes the same commands.
"""

import contextlib
import json
import os
import pathlib
import select
import subprocess
import tempfile
import time

from harness import procs

TERRACE = procs.terrace_binary()
PROGRAM = pathlib.Path(os.environ.get("TERRACE_NEGATIVE", procs.ROOT / "build/negative/programs")) / "endpoint"
ANSWER_TIMEOUT_S = 20.0

# Statuses of completions (ibv_wc_status).
SUCCESS, LOC_LEN_ERR, LOC_QP_OP_ERR, LOC_PROT_ERR, WR_FLUSH_ERR, LOC_ACCESS_ERR = 0, 1, 2, 4, 5, 8
REM_INV_REQ_ERR, REM_ACCESS_ERR, REM_OP_ERR, RETRY_EXC_ERR, RNR_RETRY_EXC_ERR = 9, 10, 11, 12, 13
# States of queue pairs (ibv_qp_state).
RTS, ERR = 3, 6
# Access flags of regions.
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC, MW_BIND, ON_DEMAND = 1, 2, 4, 8, 16, 64
ALL = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC


def stat(pid):
    """The output of `terrace stat` for the first device of a process."""
    output = subprocess.run([TERRACE, "stat", str(pid), "--json"], capture_output=True, text=True, timeout=10)
    if output.returncode != 0:
        raise AssertionError(output.stderr)
    return json.loads(output.stdout)["devices"][0]


class Commands:
    """An `endpoint` at the other side of two file descriptors."""

    def __init__(self, address, reader, writer):
        self.address = address
        self._reader, self._writer = reader, writer
        self._pending = b""
        self.qpns, self.services = {}, {}

    def __call__(self, *words, timeout_s=ANSWER_TIMEOUT_S):
        """Sends a command and returns its answer: the values by name, or the words if they have no names."""
        self.send(*words)
        return self.receive(timeout_s)

    def send(self, *words):
        os.write(self._writer, (" ".join(str(word) for word in words) + "\n").encode())

    def receive(self, timeout_s=ANSWER_TIMEOUT_S):
        answer = self._line(timeout_s).split()
        if answer[:1] == ["errno"]:
            raise OSError(int(answer[1]), os.strerror(int(answer[1])))
        if answer[:1] != ["ok"]:
            raise AssertionError(f"endpoint {self.address} answered {' '.join(answer)!r}")
        if answer[1:] and all("=" in word for word in answer[1:]):
            return {name: int(value) for name, value in (word.split("=") for word in answer[1:])}
        return answer[1:]

    def _line(self, timeout_s):
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._reader], [], [], max(deadline - time.monotonic(), 0))
            chunk = os.read(self._reader, 65536) if ready else b""
            if not chunk:
                raise AssertionError(f"no answer from endpoint {self.address} ({self.process_state()}): {self.error_output()}")
            self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        return line.decode()

    # ---- shorthands ----

    def mr(self, name, kind, size, access=ALL, *path):
        return self("mr", name, kind, size, access, *path)

    def qp(self, name, service="rc"):
        self.qpns[name], self.services[name] = self("qp", name, service)["qpn"], service
        return self.qpns[name]

    def path_words(self, _peer_address):
        """Additional words that `connect` needs to reach a peer."""
        return []

    def poll(self, name, count=1, timeout_s=10.0):
        """Up to `count` completions as (id, status) pairs."""
        return [completion[:2] for completion in self.completions(name, count, timeout_s)]

    def completions(self, name, count=1, timeout_s=10.0):
        """As `poll`, with all fields: id, status, opcode, bytes, flags, immediate or key, source."""
        answer = self("poll", name, count, timeout_s, timeout_s=timeout_s * count + ANSWER_TIMEOUT_S)
        return [tuple(int(field) for field in word.split(":")) for word in answer]

    def status(self, name, timeout_s=10.0):
        """The status of the next completion."""
        (completion,) = self.poll(name, 1, timeout_s)
        return completion[1]

    # ---- state ----

    def process_state(self):
        """The state of the process: running, or its exit status."""
        return "state unknown"

    def error_output(self):
        """The standard error of the process."""
        return "no output is known"


class Endpoint(Commands):
    """A running `endpoint` program under `terrace run`, or another program with the same commands."""

    def __init__(self, address, *options, wrapper=(), inner_wrapper=(), program=(PROGRAM,)):
        self._errors = tempfile.TemporaryFile()
        program = [*inner_wrapper, *map(str, program)]
        self.process = subprocess.Popen(
            [*wrapper, *procs.under_terrace(program, *options, addr=address)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0, **procs.OWN_GROUP)
        self.pid = self.process.pid  # `terrace run` becomes the program
        self._is_killed = False
        super().__init__(address, self.process.stdout.fileno(), self.process.stdin.fileno())

    def stat(self):
        """The output of `terrace stat` for the first device."""
        return stat(self.pid)

    def counts(self, name):
        """The counters of one queue pair."""
        (pair,) = [pair for pair in self.stat()["queue_pairs"] if pair["qpn"] == self.qpns[name]]
        return pair["counts"]

    def process_state(self):
        status = self.process.poll()
        return "running" if status is None else f"ended with {status}"

    def error_output(self):
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip() or "nothing on standard error"

    # ---- the end ----

    def kill(self):
        """SIGKILL: the process sends nothing more, as after a power failure."""
        self._is_killed = True
        self.process.kill()
        self.process.wait()

    def stop(self):
        """Closes the program's input, unless it was stopped before. Its status must be 0, unless it was killed."""
        if self._errors.closed:
            return
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            status = self.process.wait(5)
        except subprocess.TimeoutExpired:
            status = "no status within 5 s"
            self.process.kill()
            self.process.wait()
        errors = self.error_output()
        self.process.stdout.close()
        self._errors.close()
        if status != 0 and not self._is_killed:
            raise procs.UnexpectedEnd(f"endpoint {self.address} ended with {status}: {errors}")


def connect(left, left_name, right, right_name, **attributes):
    """Creates a queue pair at each end, unless one of this name exists, and brings both to RTS."""
    for end, name in ((left, left_name), (right, right_name)):
        if name not in end.qpns:
            end.qp(name)
    words = [f"{name}={value}" for name, value in attributes.items()]
    for end, name, peer, peer_name in ((left, left_name, right, right_name), (right, right_name, left, left_name)):
        end("connect", name, peer.address, peer.qpns[peer_name], *words, *end.path_words(peer.address))
