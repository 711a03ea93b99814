"""Tests of the criteria for a failed endurance run. They need no RDMA."""

import collections
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import endurance  # noqa: E402


class Starved(unittest.TestCase):
    """A few lost connections are allowed on a busy machine."""

    def failures(self, minutes, lost):
        run = endurance.Run(".", ".", "127.0.0.60", minutes * 60, 1, 1000)
        run.counts = collections.Counter({"connections lost while starved": lost})
        return [failure for failure in run.summary()["failures"] if "starved" in failure]

    def test_few(self):
        for minutes, lost in ((1.5, 0), (1.5, 1), (30, 7)):
            self.assertEqual(self.failures(minutes, lost), [])

    def test_more(self):
        for minutes, lost in ((1.5, 2), (30, 8)):
            self.assertEqual(len(self.failures(minutes, lost)), 1)


if __name__ == "__main__":
    unittest.main()
