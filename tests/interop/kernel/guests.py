"""The guest of a run of pytest: started before the first test, and again after a death.

The plugin repeats a test that fails and leaves a dead guest behind, once, and DEATHS_MAX times in all. It captures the packets of each test,
and keeps the capture of one that fails.
"""

import contextlib
import os
import time

import guest as machine
import peers
import pytest
from _pytest.runner import runtestprotocol

# If set, a run that skips all tests is a failure.
MUST_RUN = "TERRACE_MUST_RUN"
# Limit of the guest's deaths in a run. rxe of 6.1 has faults, and a guest that dies more often proves nothing about
# Terrace.
DEATHS_MAX = 3


class Guests:
    """A plugin of pytest. `start_guest` sets `peers.guest`."""

    def __init__(self, start_guest):
        self.start_guest, self.deaths, self.passed = start_guest, 0, 0
        self.lines = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if peers.guest is None or peers.guest.has_ended() and self.is_guest_dead(item):
            self.start_guest()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = self.run(item, nextitem)
        if has_failed(reports) and self.is_guest_dead(item):
            self.start_guest()
            if self.deaths <= DEATHS_MAX:
                reports = self.run(item, nextitem)
                if has_failed(reports) and self.is_guest_dead(item):
                    self.lines.append(f"{item.name}: the guest died in it twice")
                    self.start_guest()
        for report in reports:
            self.passed += report.when == "call" and report.passed
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def run(self, item, nextitem):
        """Runs a test. Returns its reports, which name what is kept of a failed one."""
        guest = peers.guest
        capture = guest.log_dir / f"{item.name}-{time.monotonic_ns()}.pcap"
        guest.begin_capture(capture)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        # The end of the capture is lost with a dead guest.
        with contextlib.suppress(machine.GuestError, OSError):
            guest.end_capture()
        if not has_failed(reports):
            capture.unlink(missing_ok=True)
        for report in reports:
            if report.failed:
                report.sections.append(("kept", f"packets: {capture}\nthe guest's console: {guest.console_path}"))
        return reports

    def is_guest_dead(self, item):
        """Whether the guest has died. A death is counted, and shown with the last lines of the console."""
        how = peers.guest.death()
        if how is None:
            return False
        self.deaths += 1
        self.lines.append(f"{item.name}: {how} (death {self.deaths} of this run); its console ends with\n{peers.guest.last_output()}")
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if peers.guest is not None:
            peers.guest.close()
        if exitstatus == pytest.ExitCode.OK and not self.passed and os.environ.get(MUST_RUN):
            self.lines.append(f"no test has passed, although {MUST_RUN} is set")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for cause, count in peers.repetitions.items():
            terminalreporter.write_line(f"repeated {count} times: {cause}")
        for line in self.lines:
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"the guest died {self.deaths} times")


def has_failed(reports):
    return any(report.failed for report in reports)
