#!/usr/bin/env python3
"""Runs Terrace against the Linux kernel's Soft-RoCE (rdma_rxe), which runs in a guest under QEMU.

    run.py                 everything
    run.py atomics Faults  tests whose name has one of the words in it

All of it runs in a network namespace of its own. Output, the guest's console and the captures of failed tests are kept
in results/interop/RUN/. A dead guest is started again, and the test in which it died is repeated: DEATHS_MAX times in
all, and once for each test. Exit status 0 when nothing failed, and, with a printed reason, when this machine cannot run
the tests; with TERRACE_MUST_RUN in the environment that is a failure.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "scripts"), str(HERE.parents[1] / "negative"), str(HERE.parent)]

import guest as machine  # noqa: E402
import image  # noqa: E402
import peers  # noqa: E402
from harness import procs  # noqa: E402

TUN = pathlib.Path("/dev/net/tun")
# Set in the process within the namespace.
INSIDE = "TERRACE_INTEROP_INSIDE"
# If set, a run that skips all tests is a failure.
MUST_RUN = "TERRACE_MUST_RUN"
# Limit of the guest's deaths in a run. rxe of 6.1 has faults, and a guest that dies more often proves nothing about
# Terrace.
DEATHS_MAX = 3


def main():
    if INSIDE in os.environ:
        return run(sys.argv[1:])
    reason = reason_to_skip()
    if reason:
        print(f"interop: 0 passed, 0 failed, all skipped: {reason}")
        return skipped_all()
    prepare()
    os.execvpe("unshare", [*unshare(), sys.executable, __file__, *sys.argv[1:]], {**os.environ, INSIDE: "1"})


def unshare():
    """The argv prefix that runs a command in separate namespaces, so that no interface of this machine changes."""
    return ["unshare", "--net", "--mount", *(["--map-root-user"] if os.geteuid() != 0 else [])]


def reason_to_skip():
    """The reason why this machine cannot run the tests, or None."""
    if not TUN.exists():
        return f"{TUN} is missing, so a guest cannot have a network (modprobe tun; in a container: --device {TUN})"
    setup = subprocess.run([procs.ROOT / "scripts/setup.sh", "interop"], stdout=sys.stdout, stderr=subprocess.PIPE, text=True)
    if setup.returncode != 0:
        if shutil.which("qemu-system-x86_64") is None:
            return f"QEMU cannot be installed: {setup.stderr.strip()}"
        sys.exit(setup.stderr.strip())
    namespace = subprocess.run([*unshare(), "mount", "-t", "sysfs", "sysfs", "/sys"], capture_output=True, text=True)
    return None if namespace.returncode == 0 else f"no network namespace: {namespace.stderr.strip()}"


def prepare():
    if not procs.terrace_binary().exists():
        sys.exit(f"interop: {procs.terrace_binary()} is missing: run `make build`")
    subprocess.run(["make", "--no-print-directory", "interop-programs"], cwd=procs.ROOT, check=True)


def skipped_all():
    """The exit status of a run that skipped all tests."""
    return 1 if os.environ.get(MUST_RUN) else 0


def run(patterns):
    procs.exit_on_signals()
    run_dir = procs.new_run_dir("interop")
    loader = unittest.TestLoader()
    loader.testNamePatterns = [f"*{pattern}*" for pattern in patterns] or None
    tests = Tests(loader.discover(str(HERE), pattern="test_*.py"), lambda: start_guest(run_dir))
    machine.create_network()
    try:
        result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=Result).run(tests)
    except (machine.GuestError, image.Incomplete) as error:
        sys.exit(f"interop: {error}")
    finally:
        if peers.guest is not None:
            peers.guest.close()
    return print_summary(result, tests.deaths)


def start_guest(run_dir):
    if peers.guest is not None:
        peers.guest.close()
    started = time.monotonic()
    peers.guest = machine.Guest(run_dir)
    print(f"the guest was up in {time.monotonic() - started:.1f} s; logs in {run_dir}", flush=True)


def print_summary(result, deaths):
    """Prints the summary; returns the exit status."""
    failed = len({id(getattr(test, "test_case", test)) for test, _ in result.failures + result.errors})  # a test may fail in parts
    skipped = len(result.skipped)
    for cause, count in peers.repetitions.items():
        print(f"repeated {count} times: {cause}")
    print(f"{result.testsRun - failed - skipped} passed, {failed} failed, {skipped} skipped; the guest died {deaths} times")
    if not result.wasSuccessful() or result.testsRun == 0:
        return 1
    return skipped_all() if skipped == result.testsRun else 0


class Tests:
    """All tests, for a test runner. A failed test that leaves a dead guest is repeated with a new guest."""

    def __init__(self, suite, start_guest):
        self.tests, self.start_guest, self.deaths = list(each_test(suite)), start_guest, 0

    def __call__(self, result):
        self.start_guest()
        for test in self.tests:
            self.run(test, result)

    def run(self, test, result):
        if peers.guest.has_ended() and self.is_guest_dead(test):
            self.start_guest()
        before = result.state()
        test(result)
        if result.state() == before or not self.is_guest_dead(test):
            return
        self.start_guest()
        if self.deaths > DEATHS_MAX:
            return
        result.restore(before)
        test(result)
        if result.state() != before and self.is_guest_dead(test):
            print(f"{test.id()}: the guest died in it twice", flush=True)
            self.start_guest()

    def is_guest_dead(self, test):
        """Whether the guest has died. A death is counted, and printed with the last lines of the console."""
        how = peers.guest.death()
        if how is None:
            return False
        self.deaths += 1
        print(f"{test.id()}: {how} (death {self.deaths} of this run); its console ends with\n{peers.guest.last_output()}", flush=True)
        return True


def each_test(suite):
    for test in suite:
        yield from each_test(test) if isinstance(test, unittest.TestSuite) else [test]


class Result(unittest.TextTestResult):
    """Captures the packets of each test, and keeps the capture of a failed one."""

    def startTest(self, test):
        self._capture = peers.guest.log_dir / f"{test.id()}.pcap"
        self._before = self.state()
        self._started = time.monotonic()
        peers.guest.begin_capture(self._capture)
        super().startTest(test)

    def stopTest(self, test):
        super().stopTest(test)
        # The end of the capture is lost with a dead guest.
        with contextlib.suppress(machine.GuestError, OSError):
            peers.guest.end_capture()
        if self.state() == self._before:
            self._capture.unlink(missing_ok=True)

    def addSuccess(self, test):
        self.stream.write(f"({time.monotonic() - self._started:.1f} s) ")
        super().addSuccess(test)

    def state(self):
        """The number of failures and errors."""
        return len(self.failures), len(self.errors)

    def restore(self, state):
        """Drops the failures and errors of the last test."""
        del self.failures[state[0]:], self.errors[state[1]:]
        self.testsRun -= 1

    def _exc_info_to_string(self, err, test):
        kept = f"packets: {self._capture}\nthe guest's console: {peers.guest.console_path}\n"
        return super()._exc_info_to_string(err, test) + kept


if __name__ == "__main__":
    sys.exit(main())
