"""What a conformance case is, and how the different kinds of cases are run and judged."""

import dataclasses
import json
import shutil
import subprocess
import time
from typing import Callable, Optional

from harness import perftest, procs

ZERO = "a result of zero"
# How often to try what some known fault of others keeps from succeeding at times.
TRIES = 3
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


def tried_again(run, is_bad_luck):
    """What `run` ends with, given the number of the try: the first that is not known bad luck, or that of the last try."""
    for attempt in range(TRIES):
        outcome = run(attempt)
        if not is_bad_luck(outcome):
            break
    return outcome


@dataclasses.dataclass
class Result:
    """How a case ended."""

    name: str
    status: str
    reason: str = ""
    seconds: float = 0.0

    def as_dict(self):
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Case:
    """A server and a client, or one program, and what must be true afterwards.

    In `server`, `client` and `single`, {port} stands for a free TCP port, {host} for where the two ends meet over TCP, and {addr}
    for the address that the NICs use, `addr`; `client_addr` is that of the client if it has another one. Programs that cannot be told
    a port have a `fixed_port`.
    `check` gets the outcomes and answers with a complaint or None.
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
    server_stays: bool = False
    # How often to try. An unreliable service loses what comes while a busy machine keeps the receiver off its processor, and
    # perftest waits for lost messages for ever, on any NIC, or computes a rate of zero from what it did not see.
    tries: int = 1
    # The feature that this needs and Terrace does not have (yet): the program must then say so and end, nothing else.
    unsupported: str = ""

    def run(self, log_dir):
        started = time.monotonic()
        for attempt in range(1, self.tries + 1):
            attempt_dir = log_dir if self.tries == 1 else log_dir / f"try-{attempt}"
            attempt_dir.mkdir(parents=True)
            status, reason, stopped = self._judge(attempt_dir)
            if not stopped and not reason.startswith(ZERO):
                break
        if attempt > 1:
            reason = f"try {attempt} of {self.tries}: {reason}".removesuffix(": ")
        seconds = round(time.monotonic() - started, 2)
        result = Result(self.name, status, reason, seconds)
        (log_dir / "result.json").write_text(json.dumps({**result.as_dict(), "case": self.describe()}, indent=1) + "\n")
        return result

    def describe(self):
        """The commands, for a reader who wants to run them by hand."""
        return [" ".join(argv) for argv in (self.server, self.client, self.single) if argv]

    def _judge(self, log_dir):
        """Status, reason, and whether a program had to be stopped."""
        programs = [argv[0] for argv in (self.server, self.client, self.single) if argv]
        missing = [program for program in programs if shutil.which(program) is None]
        if missing:
            return FAILED, f"{missing[0]} is not installed (scripts/setup.sh conformance)", False
        outcomes, note = self._execute(log_dir)
        stopped = any(outcome.status is None for outcome in outcomes.values())
        return *self._judge_outcomes(outcomes, note), stopped

    def _judge_outcomes(self, outcomes, note):
        if self.unsupported:
            return self._judge_unsupported(outcomes)
        for end, outcome in outcomes.items():
            if outcome.status != 0:
                return FAILED, note or f"{end}: {outcome.verdict}: {last_words(outcome)}"
        complaint = self.check(outcomes) if self.check else None
        return (FAILED, complaint) if complaint else (PASSED, "")

    def _judge_unsupported(self, outcomes):
        """A clear refusal is what the user must see: no crash, no hang, and a message."""
        first = next(iter(outcomes.values()))
        if all(outcome.status == 0 for outcome in outcomes.values()):
            return FAILED, f"works, although listed as unsupported ({self.unsupported}): take it off that list"
        if first.status is None or first.status < 0:
            return FAILED, f"{self.unsupported} is unsupported, but the program {first.verdict}"
        if not first.text.strip():
            return FAILED, f"{self.unsupported} is unsupported, but the program did not say anything"
        return SKIPPED, f"{self.unsupported} is not supported; the program says: {last_words(first)}"

    def _execute(self, log_dir):
        port = self.fixed_port or procs.free_port()

        def command(argv, addr=self.addr):
            filled = [arg.format(port=port, host=procs.HOST, addr=self.addr) for arg in argv]
            return procs.under_terrace(filled, *self.run_options, addr=addr)

        if self.single:
            return {"program": procs.run_one(command(self.single), log_dir, "program", self.timeout_s, self.env)}, ""
        client = command(self.client, self.client_addr or self.addr)
        pair = procs.run_pair(command(self.server), client, port, log_dir, self.timeout_s, self.env, self.server_stays)
        return {"server": pair.server, "client": pair.client}, pair.note


def last_words(outcome):
    """What most likely says why: the last lines on standard error, or else the last one on standard output."""
    for text, count in ((outcome.err, 3), (outcome.out, 1)):
        lines = [line.strip() for line in text.splitlines() if line.strip(" -\t\r")]
        if lines:
            return "; ".join(lines[-count:])[-300:]
    return "(no output)"


# ---- checks ------------------------------------------------------------------------------------------------------------


def table_rows(count):
    """The client's table has `count` rows and no result in it is zero."""

    def check(outcomes):
        rows = perftest.parse_table(outcomes["client"].out)
        if len(rows) != count:
            return f"{len(rows)} rows of results instead of {count}"
        # The message rate of large messages is printed with too few digits to be anything but 0.
        measured = ("BW average[MB/sec]", "t_typical[usec]", "t_avg[usec]")
        for row in rows:
            if any(row[title] <= 0 for title in measured if title in row):
                return f"{ZERO} at {row['#bytes']:.0f} bytes"
        return None

    return check


def prints(*needles, end="client"):
    """The output of `end` has each of these strings in it."""

    def check(outcomes):
        missing = [needle for needle in needles if needle not in outcomes[end].text]
        return f"the {end} did not print {missing[0]!r}" if missing else None

    return check


def prints_none(*needles):
    """No end's output has one of these strings in it."""

    def check(outcomes):
        for end, outcome in outcomes.items():
            for needle in needles:
                if needle in outcome.text:
                    return f"the {end} printed {needle!r}: {last_words(outcome)}"
        return None

    return check


def all_of(*checks):
    """The first complaint of several checks."""

    def check(outcomes):
        return next(filter(None, (each(outcomes) for each in checks)), None)

    return check


def installed(program):
    """Whether `program` is in the PATH."""
    return shutil.which(program) is not None


def run_quietly(argv):
    """Standard output of a helper program that is no part of the test."""
    return subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout
