"""Shared parts of the negative tests: the command under test, fresh addresses, and endpoints.

`make test` runs them; after `make build negative-programs`, `build/tools/bin/pytest tests/negative` does.
"""

import contextlib
import itertools
import os
import pathlib
import sys
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from harness import hugepages, procs  # noqa: E402, F401
from harness.endpoint import (  # noqa: E402, F401
    ALL, ERR, LOC_LEN_ERR, LOC_PROT_ERR, LOCAL_WRITE, MW_BIND, ON_DEMAND, PROGRAM, REM_ACCESS_ERR, REM_INV_REQ_ERR,
    REM_OP_ERR, REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE, RETRY_EXC_ERR, RNR_RETRY_EXC_ERR, RTS, SUCCESS, TERRACE,
    WR_FLUSH_ERR, Endpoint, connect)

PROGRAMS = PROGRAM.parent

# Exit status of a command with wrong usage.
USAGE = 2

_numbers = itertools.count()


def fresh_address():
    """A loopback address that no other test and no concurrent run uses. It represents a host."""
    pid, number = os.getpid(), next(_numbers)
    assert number < 3 * 254
    return f"127.{64 * (number // 254 + 1) + (pid >> 8) % 64}.{pid % 256}.{number % 254 + 1}"


def fill(path):
    """Fills a pipe or a terminal, by a description of its own: that of the process under test goes on to wait."""
    filled = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(filled, bytes(4096))
    finally:
        os.close(filled)


def assert_refused(test, outcome, status, said):
    """The command ended with `status` and printed only an error that contains `said`: one line, unless it is a usage
    error."""
    test.assertEqual(outcome.returncode, status, outcome.stderr)
    test.assertEqual(outcome.stdout, "")
    test.assertIn(said, outcome.stderr)
    if status != USAGE:
        test.assertTrue(outcome.stderr.startswith("terrace: "), outcome.stderr)
        test.assertEqual(outcome.stderr.count("\n"), 1, outcome.stderr)


class NegativeTest(unittest.TestCase):
    """A test case that stops its endpoints at its end."""

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        for needed in (TERRACE, PROGRAMS / "endpoint"):
            if not needed.exists():
                raise FileNotFoundError(f"{needed} is missing: run `make build negative-programs` first")

    def start(self, address=None, *options, **keywords):
        """Starts an endpoint with its device open."""
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

    def eventually(self, condition, what, timeout_s=5.0):
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                self.fail(f"{what}: not within {timeout_s} s")
            time.sleep(0.02)
