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


def new_run_dir(kind):
    """A folder for the output of this run, results/KIND/TIME-PID; the symbolic link results/KIND/latest names it."""
    run_dir = ROOT / f"results/{kind}/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run_dir.mkdir(parents=True)
    latest = run_dir.parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(run_dir.name)
    return run_dir


def terrace_binary():
    """The command under test: `build/bin/terrace`, or the path in TERRACE (an installed one, say)."""
    return pathlib.Path(os.environ.get("TERRACE", ROOT / "build/bin/terrace"))


def under_terrace(argv, *options, addr=HOST):
    """The command line that runs `argv` with a software NIC."""
    return [str(terrace_binary()), "run", "--addr", addr, *options, "--", *argv]


def free_port():
    """A TCP port without a listener. Another program may take it first; no program of these tests does."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def is_listening(port):
    """Whether some process listens on `port`, by TCP or by rdma_cm. Connecting to find out would use up a server's only accept."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            next(lines)
            for line in lines:
                columns = line.split()
                if columns[3] == "0A" and int(columns[1].rsplit(":", 1)[1], 16) == port:
                    return True
    # The sockets by which processes on one host find each other's listeners (crates/ibverbs/src/rdma_cm/rendezvous.rs).
    with contextlib.suppress(OSError), open("/proc/net/unix") as lines:
        names = (line.rsplit(" ", 1)[-1] for line in lines)
        return any(name.startswith("@terrace-cm/") and f"/{port}/" in name and "/slot/" in name for name in names)
    return False


def wait_until(condition, what, patience_s=20):
    """Returns when the condition holds; fails after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {patience_s} s")
        time.sleep(0.05)


@dataclass
class Outcome:
    """How one program ended and what it printed."""

    argv: list
    status: int = None  # exit status; negative: the signal that ended it; None: it had to be stopped
    seconds: float = 0.0
    out: str = ""
    err: str = ""
    # Whether the kernel has dropped packets to it because a receive buffer was full.
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
    """Stops all programs when the harness ends."""
    for program in list(_running):
        # No test is left to report it.
        with contextlib.suppress(UnexpectedEnd):
            program.stop()


def end_cleanly_when_asked():
    """Makes SIGTERM and SIGHUP end this process by `sys.exit`, so that the programs that it started are stopped."""

    def end(number, _frame):
        # A second signal (timeout(1) signals the whole process group) must not interrupt the stopping of programs.
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    # nohup(1) sets it to be ignored.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, end)


class UnexpectedEnd(AssertionError):
    """A stopped program has ended in an unexpected way."""


# Exit statuses after SIGTERM: it returns 0, the signal ends it, or it exits with 128 + the signal, as a shell does.
ENDS_WHEN_ASKED = (0, -signal.SIGTERM, 128 + signal.SIGTERM)


class Program:
    """A started program in a process group of its own, its output in two files."""

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
                # A new session would have a processor share of its own (autogroup), independent of its priority.
                process_group=0,
            )
        self._has_overflowed = False  # as seen before it was stopped
        self._is_judged = False  # whether an outcome has given the caller its exit status
        _running.add(self)

    def wait(self, seconds):
        """The exit status, or None when the program still runs after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(max(seconds, 0.01))
            _running.discard(self)
            return status
        return None

    def stop(self, is_late=False):
        """Ends the program and its children: SIGTERM, then SIGKILL. Raises `UnexpectedEnd` if its exit status is none
        of `ENDS_WHEN_ASKED`, unless the caller has the outcome already. A late program has failed already; it raises
        only after a crash."""
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
        is_expected = status in ENDS_WHEN_ASKED or is_late and (status >= 0 or status == -signal.SIGKILL)
        if not self._is_judged and not is_expected:
            outcome = self.outcome()
            raise UnexpectedEnd(f"{self.paths[0].stem}, at its end: {outcome.verdict}: {outcome.text.strip()[-500:]}")

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
        self._is_judged |= status is not None
        has_overflowed = self._has_overflowed or OVERFLOW_LOG in err
        return Outcome(self.argv, status, time.monotonic() - self.started, out, err, has_overflowed)


def stop_all(programs, are_late=False):
    """Stops each program, also when stopping another one raises."""
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
    """How the two ends of a test ended."""

    server: Outcome
    client: Outcome
    note: str = ""  # an error that the harness itself saw
    seconds: float = field(default=0.0)


def run_pair(server, client, port, log_dir, timeout_s=60, env=None, server_stays=False):
    """Starts `server`, waits until it listens on TCP `port`, runs `client` against it.

    With `server_stays` the server serves for ever: it is stopped when the client has ended, and its exit status counts
    as 0.
    """
    started = time.monotonic()
    ends = Program(server, log_dir, "server", env)
    while not is_listening(port):
        gone = ends.wait(0.02) is not None
        if gone or time.monotonic() - started > timeout_s:
            if not gone:
                ends.stop(is_late=True)
            return PairOutcome(ends.outcome(not gone), Outcome(list(client)), "the server never listened",
                               time.monotonic() - started)
    other = Program(client, log_dir, "client", env)
    deadline = started + timeout_s
    client_ended = other.wait(deadline - time.monotonic()) is not None
    # A failed client leaves the server waiting: it gets STOP_GRACE_S, not the rest of the limit.
    patience = deadline - time.monotonic() if other.process.returncode == 0 else STOP_GRACE_S
    server_ended = not server_stays and ends.wait(patience) is not None
    is_late = not client_ended or not server_ended and not server_stays
    stop_all((program for program, ended in ((ends, server_ended), (other, client_ended)) if not ended), is_late)
    outcome = PairOutcome(ends.outcome(not server_ended), other.outcome(not client_ended))
    if server_stays and not server_ended:
        outcome.server.status = 0
    outcome.seconds = time.monotonic() - started
    return outcome


def cpu_seconds(pid):
    """User and system time that process `pid` has used so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def disk_bytes_read(pid):
    """Bytes that process `pid` has caused to be read from storage, page faults included; None when it has ended."""
    with contextlib.suppress(OSError):
        lines = pathlib.Path(f"/proc/{pid}/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])
    return None
