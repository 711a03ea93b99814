"""Runs programs under `terrace run`: one, or a server and a client, with captured logs and a time limit."""

import atexit
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
STOP_GRACE_S = 3.0
# Arguments of Popen for a process group of its own. A new session would get a separate processor share (autogroup), independent of its
# priority. Python before 3.11 has no argument for it.
OWN_GROUP = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}


def new_run_dir(kind):
    """A folder for the output of this run, results/KIND/TIME-PID; the symbolic link results/KIND/latest names it."""
    run_dir = ROOT / f"results/{kind}/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run_dir.mkdir(parents=True)
    latest = run_dir.parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(run_dir.name)
    return run_dir


def terrace_binary():
    """The command under test: `build/bin/terrace`, or the path in TERRACE, for example an installed one."""
    return pathlib.Path(os.environ.get("TERRACE", ROOT / "build/bin/terrace"))


def under_terrace(argv, *options, addr=HOST):
    """The command line that runs `argv` with a software NIC."""
    return [str(terrace_binary()), "run", "--addr", addr, *options, "--", *argv]


def free_port():
    """A TCP port without a listener. Another program could take it; no program of these tests does."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def is_listening(port):
    """Whether a process listens on `port`, by TCP or by rdma_cm. A connection attempt would use up a server's only accept."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            next(lines)
            for line in lines:
                columns = line.split()
                if columns[3] == "0A" and int(columns[1].rsplit(":", 1)[1], 16) == port:
                    return True
    # The sockets by which processes of a host find each other's listeners (crates/ibverbs/src/rdma_cm/rendezvous.rs).
    with contextlib.suppress(OSError), open("/proc/net/unix") as lines:
        names = (line.rsplit(" ", 1)[-1] for line in lines)
        return any(name.startswith("@terrace-cm/") and f"/{port}/" in name and "/slot/" in name for name in names)
    return False


def wait_until(condition, what, timeout_s=20):
    """Returns when the condition holds; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s} s")
        time.sleep(0.05)


@dataclass
class Outcome:
    """The exit status and output of a program."""

    argv: list
    status: int = None  # exit status; negative: the signal that ended the program; None: it was stopped
    seconds: float = 0.0
    out: str = ""
    err: str = ""
    # Whether the kernel has dropped packets to the program because a receive buffer was full.
    has_overflowed: bool = False

    @property
    def text(self):
        return self.out + self.err

    @property
    def verdict(self):
        if self.status is None:
            return "did not end in time"
        if self.status < 0:
            return f"was killed by {signal.Signals(-self.status).name}"
        return f"exit status {self.status}"


# Logged at level info when packets have been dropped (crates/fabric/src/udp/socket.rs).
OVERFLOW_LOG = "the receive buffer was full (rx_overflows)"


def packets_dropped(pid):
    """Packets that the kernel has dropped at the UDP sockets of a running process. `rx_overflows` is this number as of
    the last received packet, so it lags when no packet follows the drop."""
    inodes, dropped = set(), 0
    with contextlib.suppress(OSError):
        for descriptor in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                kind, _, rest = os.readlink(descriptor).partition(":[")
                if kind == "socket":
                    inodes.add(rest.rstrip("]"))
    for table in ("/proc/net/udp", "/proc/net/udp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            next(lines)
            dropped += sum(int(columns[-1]) for columns in map(str.split, lines) if columns[9] in inodes)
    return dropped


_running = set()


@atexit.register
def _stop_all():
    """Stops all programs when the harness exits."""
    for program in list(_running):
        # No test can report the error any more.
        with contextlib.suppress(UnexpectedEnd):
            program.stop()


def exit_on_signals():
    """Makes SIGTERM and SIGHUP end this process by `sys.exit`, so that the programs that it started are stopped."""

    def end(number, _frame):
        # A second signal (timeout(1) signals the whole process group) must not interrupt the stopping of programs.
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    # nohup(1) makes the process ignore SIGHUP.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, end)


class UnexpectedEnd(AssertionError):
    """A stopped program has ended in an unexpected way."""


# Exit statuses after SIGTERM: 0, termination by the signal, or 128 + the signal as from a shell.
STATUSES_AFTER_SIGTERM = (0, -signal.SIGTERM, 128 + signal.SIGTERM)


class Program:
    """A started program in its own process group, with its output in two files."""

    def __init__(self, argv, log_dir, name, env=None, stdout=None):
        self.argv = [str(arg) for arg in argv]
        self.log_dir = pathlib.Path(log_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.paths = (self.log_dir / f"{name}.out", self.log_dir / f"{name}.err")
        self.started = time.monotonic()
        with open(self.paths[0], "wb") as out, open(self.paths[1], "wb") as err:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=stdout or out,
                stderr=err,
                env={**os.environ, **(env or {})},
                **OWN_GROUP,
            )
        self._has_overflowed = False  # before the program was stopped
        self._is_reported = False  # whether an outcome has given the caller its exit status
        _running.add(self)

    def wait(self, seconds):
        """The exit status, or None if the program still runs after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(max(seconds, 0.01))
            _running.discard(self)
            return status
        return None

    def stop(self, is_late=False):
        """Ends the program and its children: SIGTERM, then SIGKILL. Raises `UnexpectedEnd` if its exit status is none
        of `STATUSES_AFTER_SIGTERM`, unless the caller has the outcome already. For a late program, which has failed
        already, raises only after a crash."""
        if self.process.poll() is None:
            self._has_overflowed = packets_dropped(self.process.pid) > 0
            self._keep_counters()
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            if self.wait(STOP_GRACE_S) is not None:
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.returncode
        is_expected = status in STATUSES_AFTER_SIGTERM or is_late and (status >= 0 or status == -signal.SIGKILL)
        if not self._is_reported and not is_expected:
            outcome = self.outcome()
            raise UnexpectedEnd(f"{self.paths[0].stem}, after SIGTERM: {outcome.verdict}: {outcome.text.strip()[-500:]}")

    def _keep_counters(self):
        """Writes the program's `terrace stat`, if it has a device, beside its output, to show why it had to be
        stopped."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            shown = subprocess.run([terrace_binary(), "stat", str(self.process.pid), "--json"], capture_output=True, timeout=5)
            if shown.returncode == 0:
                self.paths[0].with_suffix(".stat").write_bytes(shown.stdout)

    def outcome(self, stopped=False):
        out, err = (path.read_text(errors="replace") for path in self.paths)
        status = None if stopped else self.process.returncode
        self._is_reported |= status is not None
        has_overflowed = self._has_overflowed or OVERFLOW_LOG in err
        return Outcome(self.argv, status, time.monotonic() - self.started, out, err, has_overflowed)


def stop_all(programs, are_late=False):
    """Stops each program, even if stopping another one raises."""
    with contextlib.ExitStack() as stack:
        for program in programs:
            stack.callback(program.stop, are_late)


def run_one(argv, log_dir, name="program", timeout_s=60, env=None):
    """Runs a program to its end or to its time limit."""
    program = Program(argv, log_dir, name, env)
    ended = program.wait(timeout_s) is not None
    if not ended:
        program.stop(is_late=True)
    return program.outcome(stopped=not ended)


@dataclass
class PairOutcome:
    """The outcomes of a test's two programs."""

    server: Outcome
    client: Outcome
    note: str = ""  # an error of the harness
    seconds: float = field(default=0.0)


def run_pair(server, client, port, log_dir, timeout_s=60, env=None, is_server_permanent=False):
    """Starts `server`, waits until it listens on TCP `port`, runs `client` against it.

    With `is_server_permanent` the server does not exit by itself: it is stopped when the client has ended, and its status counts
    as 0.
    """
    started = time.monotonic()
    server_program = Program(server, log_dir, "server", env)
    while not is_listening(port):
        gone = server_program.wait(0.02) is not None
        if gone or time.monotonic() - started > timeout_s:
            if not gone:
                server_program.stop(is_late=True)
            return PairOutcome(server_program.outcome(not gone), Outcome(list(client)), "the server never listened",
                               time.monotonic() - started)
    client_program = Program(client, log_dir, "client", env)
    deadline = started + timeout_s
    client_ended = client_program.wait(deadline - time.monotonic()) is not None
    # After a failed client the server still waits for it: the server gets STOP_GRACE_S, not the rest of the limit.
    grace_s = deadline - time.monotonic() if client_program.process.returncode == 0 else STOP_GRACE_S
    server_ended = not is_server_permanent and server_program.wait(grace_s) is not None
    is_late = not client_ended or not server_ended and not is_server_permanent
    stop_all((program for program, ended in ((server_program, server_ended), (client_program, client_ended)) if not ended), is_late)
    outcome = PairOutcome(server_program.outcome(not server_ended), client_program.outcome(not client_ended))
    if is_server_permanent and not server_ended:
        outcome.server.status = 0
    outcome.seconds = time.monotonic() - started
    return outcome


def cpu_seconds(pid):
    """User and system time that process `pid` has used so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def disk_bytes_read(pid):
    """Bytes that process `pid` has caused to be read from storage, including page faults; None if the process has ended."""
    with contextlib.suppress(OSError):
        lines = pathlib.Path(f"/proc/{pid}/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])
    return None
