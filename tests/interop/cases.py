"""Conformance cases: their definition, execution and evaluation."""

import dataclasses
import json
import re
import shutil
import subprocess
import time
from typing import Callable, Optional

import pytest
from harness import perftest, procs

ZERO = "a result of zero"
# With events, perftest 4.5 has one channel for both queues. It takes an event of the other queue for one of the queue that it polls then,
# and reads the status of a completion that it did not get: any number. ib_send_lat by XRC does so at times on a busy machine.
FAILED_STATUS = re.compile(r"Failed status (-?\d+)")
STATUSES = range(24)  # ibv_wc_status
# Tries of a case that sometimes fails for a cause outside of Terrace.
TRIES = 3
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


def repeated(run, cause_of):
    """Repeats `run`, which gets the number of the try, while `cause_of` names a cause outside of Terrace for its
    failure, and tries are left. Returns the last outcome, and the causes of the repetitions."""
    causes = []
    for attempt in range(TRIES):
        outcome = run(attempt)
        cause = cause_of(outcome)
        if cause is None or attempt == TRIES - 1:
            return outcome, causes
        causes.append(cause)


@dataclasses.dataclass
class Result:
    """The result of a case."""

    name: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    is_flaky: bool = False  # whether it passed only when it was repeated

    def as_dict(self):
        return dataclasses.asdict(self)

    def conclude(self, record_property, run_dir):
        """Ends a test of pytest with this result; `run_dir` has the output of all cases."""
        if self.is_flaky:
            record_property("flaky", self.reason)
        if self.status == SKIPPED:
            pytest.skip(self.reason)
        if self.status == FAILED:
            pytest.fail(f"{self.reason}\noutput: {run_dir / self.name}", pytrace=False)


@dataclasses.dataclass(frozen=True)
class Case:
    """A server and a client, or one program, and the checks of their outcomes.

    In `server`, `client` and `single`, {port} stands for a free TCP port, {host} for the address of the TCP connection
    between the ends, and {addr} for the address that the NICs use, `addr`; `client_addr` is that of the client if it
    has another one. Programs without an option for the port have a `fixed_port`.
    `check` gets the outcomes and returns a complaint or None.
    """

    name: str
    server: tuple = ()
    client: tuple = ()
    single: tuple = ()
    check: Optional[Callable] = None
    timeout_s: int = 60
    addr: str = procs.HOST
    client_addr: str = ""
    fixed_port: int = 0
    run_options: tuple = ()
    env: dict = dataclasses.field(default_factory=dict)
    is_server_permanent: bool = False
    # An unreliable service loses packets while a busy machine does not schedule the receiver. perftest then waits for
    # the lost messages for ever, or computes a rate of zero, as with any NIC. Such a case is repeated if the kernel has
    # dropped a packet.
    is_unreliable: bool = False
    # A feature that the case needs and Terrace does not have (yet): the program must then print an error and end.
    unsupported: str = ""

    def run(self, log_dir):
        started = time.monotonic()

        def run(attempt):
            attempt_dir = log_dir / f"try-{attempt + 1}" if self.is_unreliable or attempt else log_dir
            attempt_dir.mkdir(parents=True)
            return self._evaluate(attempt_dir)

        (status, reason, _), causes = repeated(run, lambda judged: judged[2])
        is_flaky = bool(causes) and status == PASSED
        if causes:
            reason = f"{'flaky' if is_flaky else 'not even'} at try {len(causes) + 1}, {causes[-1]}: {reason}".removesuffix(": ")
        result = Result(self.name, status, reason, round(time.monotonic() - started, 2), is_flaky)
        (log_dir / "result.json").write_text(json.dumps({**result.as_dict(), "case": self.describe()}, indent=1) + "\n")
        return result

    def describe(self):
        """The commands, for execution by hand."""
        return [" ".join(argv) for argv in (self.server, self.client, self.single) if argv]

    def _evaluate(self, log_dir):
        """Status, reason, and the cause to repeat the case, or None."""
        programs = [argv[0] for argv in (self.server, self.client, self.single) if argv]
        missing = [program for program in programs if shutil.which(program) is None]
        if missing:
            return FAILED, f"{missing[0]} is not installed (scripts/setup.sh conformance)", None
        try:
            outcomes, note = self._execute(log_dir)
        except procs.UnexpectedEnd as end:
            return FAILED, str(end), None
        status, reason = self._evaluate_outcomes(outcomes, note)
        return status, reason, self._cause_to_repeat(outcomes, reason)

    def _cause_to_repeat(self, outcomes, reason):
        statuses = (int(status) for outcome in outcomes.values() for status in FAILED_STATUS.findall(outcome.text))
        if any(status not in STATUSES for status in statuses):
            return "after perftest had read a completion that was not there"
        is_starved = any(outcome.status is None for outcome in outcomes.values()) or reason.startswith(ZERO)
        has_overflowed = any(outcome.has_overflowed for outcome in outcomes.values())
        return "after the kernel had dropped packets" if self.is_unreliable and is_starved and has_overflowed else None

    def _evaluate_outcomes(self, outcomes, note):
        if self.unsupported:
            return self._evaluate_unsupported(outcomes)
        for end, outcome in outcomes.items():
            if outcome.status != 0:
                return FAILED, note or f"{end}: {outcome.verdict}: {last_output(outcome)}"
        complaint = self.check(outcomes) if self.check else None
        return (FAILED, complaint) if complaint else (PASSED, "")

    def _evaluate_unsupported(self, outcomes):
        """The program must exit with an error message, without a crash or hang."""
        first = next(iter(outcomes.values()))
        if all(outcome.status == 0 for outcome in outcomes.values()):
            return FAILED, f"works, although listed as unsupported ({self.unsupported}): remove it from that list"
        if first.status is None or first.status < 0:
            return FAILED, f"{self.unsupported} is unsupported, but the program {first.verdict}"
        if not first.text.strip():
            return FAILED, f"{self.unsupported} is unsupported, but the program did not say anything"
        return SKIPPED, f"{self.unsupported} is not supported; the program says: {last_output(first)}"

    def _execute(self, log_dir):
        port = self.fixed_port or procs.free_port()
        # The log of an ended program tells whether packets were dropped.
        env = {**self.env, "TERRACE_LOG": "info"} if self.is_unreliable else self.env

        def command(argv, addr=self.addr):
            filled = [arg.format(port=port, host=procs.HOST, addr=self.addr) for arg in argv]
            return procs.under_terrace(filled, *self.run_options, addr=addr)

        if self.single:
            return {"program": procs.run_one(command(self.single), log_dir, "program", self.timeout_s, env)}, ""
        client = command(self.client, self.client_addr or self.addr)
        pair = procs.run_pair(command(self.server), client, port, log_dir, self.timeout_s, env, self.is_server_permanent)
        return {"server": pair.server, "client": pair.client}, pair.note


def last_output(outcome):
    """The most likely reason: the last lines on standard error, otherwise the last line on standard output."""
    for text, count in ((outcome.err, 3), (outcome.out, 1)):
        lines = [line.strip() for line in text.splitlines() if line.strip(" -\t\r")]
        if lines:
            return "; ".join(lines[-count:])[-300:]
    return "(no output)"


# ---- programs that start at once -----------------------------------------------------------------------------------------


def all_verify(log_dir, commands, env=None, limit_s=90):
    """Runs all programs at once: name -> command. Each must end well and say that it has verified its data."""
    programs = {name: procs.Program(procs.under_terrace(command), log_dir, name, env) for name, command in commands.items()}
    try:
        for name, program in programs.items():
            status = program.wait(limit_s)
            if status != 0:
                return f"the {name} {'is late' if status is None else 'failed'}: {last_output(program.outcome())}"
            if "verified" not in program.outcome().out:
                return f"the {name} verified nothing: {last_output(program.outcome())}"
    finally:
        procs.stop_all([program for program in programs.values() if program.process.poll() is None], are_late=True)
    return None


# ---- checks ------------------------------------------------------------------------------------------------------------


def table_rows(count):
    """The client's table has `count` rows and no result in it is zero."""

    def check(outcomes):
        rows = perftest.parse_table(outcomes["client"].out)
        if len(rows) != count:
            return f"{len(rows)} rows of results instead of {count}"
        # The message rate of large messages is printed with too few digits and may be 0.
        measured = ("BW average[MB/sec]", "t_typical[usec]", "t_avg[usec]")
        for row in rows:
            if any(row[title] <= 0 for title in measured if title in row):
                return f"{ZERO} at {row['#bytes']:.0f} bytes"
        return None

    return check


def prints(*needles, end="client"):
    """The output of `end` contains each of these strings."""

    def check(outcomes):
        missing = [needle for needle in needles if needle not in outcomes[end].text]
        return f"the {end} did not print {missing[0]!r}" if missing else None

    return check


def prints_none(*needles):
    """No end's output contains one of these strings."""

    def check(outcomes):
        for end, outcome in outcomes.items():
            for needle in needles:
                if needle in outcome.text:
                    return f"the {end} printed {needle!r}: {last_output(outcome)}"
        return None

    return check


def all_of(*checks):
    """The first error of several checks."""

    def check(outcomes):
        return next(filter(None, (each(outcomes) for each in checks)), None)

    return check


def installed(program):
    """Whether `program` is in the PATH."""
    return shutil.which(program) is not None


def run_quietly(argv):
    """Standard output of a helper program outside of the test."""
    return subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout
