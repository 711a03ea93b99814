"""Tests of the criteria for a bystander's failure. They need no RDMA."""

import pathlib
import sys
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "scripts"), str(HERE.parent / "negative")]

import bystanders  # noqa: E402
from harness import procs  # noqa: E402

# Printed by rping of Debian 12 at the end of some runs (rdma-core pull request 1622), with an exit status other than 0.
COMPLAINT = "rdma_get_cm_event: Bad file descriptor\n"
PINGS = "".join(f"ping data: rdma-ping-{number}: ABCDEFGHIJKLMNOPQRSTUVWXYZ\n" for number in range(5))


class Caller(unittest.TestCase):
    def once(self, status, out, err):
        caller = bystanders.Caller("connections", "127.0.0.1", "127.0.0.2", 7, pathlib.Path())
        with mock.patch.object(procs, "run_one", return_value=procs.Outcome([], status, 0, out, err)):
            return caller.once()

    def test_all_pings(self):
        self.assertIsNone(self.once(0, PINGS, ""))
        self.assertIn("1622", self.once(255, PINGS, COMPLAINT))

    def test_a_failure_with_one_line(self):
        for status, out, err in ((255, "", COMPLAINT), (255, PINGS[:100], COMPLAINT), (255, PINGS, ""), (1, PINGS, "cq error\n" + COMPLAINT),
                                 (-11, PINGS, COMPLAINT), (None, PINGS, COMPLAINT), (0, "", "")):
            with self.subTest(status=status, out=out, err=err), self.assertRaises(bystanders.Failure):
                self.once(status, out, err)


if __name__ == "__main__":
    unittest.main()
