"""What pytest does in all suites: it ends their programs when it is signalled, and lists results that took several tries."""

import signal
import sys
import unittest

import pytest

# The property of a test that passed only when it was repeated: the reason.
FLAKY = "flaky"


def enter_context(test, context):
    """What unittest has since Python 3.11."""
    value = context.__enter__()
    test.addCleanup(context.__exit__, None, None, None)
    return value


def enter_class_context(case, context):
    value = context.__enter__()
    case.addClassCleanup(context.__exit__, None, None, None)
    return value


if sys.version_info < (3, 11):
    unittest.TestCase.enterContext = enter_context
    unittest.TestCase.enterClassContext = classmethod(enter_class_context)


def pytest_configure():
    """`timeout` and a closed terminal end the run as Ctrl-C does, so that the programs that it started are stopped."""

    def end(number, _frame):
        # A second signal (timeout(1) signals the whole process group) must not interrupt the stopping of programs.
        signal.signal(number, signal.SIG_IGN)
        pytest.exit(f"ended by {signal.Signals(number).name}", returncode=128 + number)

    signal.signal(signal.SIGTERM, end)
    # nohup(1) makes the process ignore SIGHUP.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, end)


def pytest_terminal_summary(terminalreporter):
    passed = terminalreporter.getreports("passed")
    flaky = [(report.nodeid, reason) for report in passed for name, reason in report.user_properties if name == FLAKY]
    for name, reason in flaky:
        terminalreporter.write_line(f"FLAKY {name}: {reason}")
