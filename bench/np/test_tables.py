"""The bars of `make bench-np`."""

import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "peers")]

import tables  # noqa: E402


def points(*rows):
    names = ("case", "op", "size", "p50_ns", "p99_ns")
    found = [dict(zip(names, (*row, row[-1]))) for row in rows]
    return tables.Points({"points": found, "rows": [{"round": 0, **row} for row in found]})


class Bars(unittest.TestCase):
    def test_present_pages_may_cost_three_percent_or_fifty_nanoseconds(self):
        for pin, np, is_met in ((1000, 1050, True), (1000, 1051, False), (10_000, 10_300, True), (10_000, 10_301, False)):
            (bar,) = tables.present_bars(points(("pin", "READ", 8, pin), ("np", "READ", 8, np)), "udp")
            self.assertEqual(bar.is_met, is_met, bar)

    def test_first_touches_are_compared_with_memory_that_was_touched(self):
        found = points(("pin, touched before", "WRITE", 8, 8000), ("pin", "WRITE", 8, 9000), ("np", "WRITE", 8, 14_001))
        (bar,) = tables.minor_bars(found, "udp")
        self.assertFalse(bar.is_met, bar)
        self.assertEqual(tables.minor_bars(found, "local"), [])

    def test_pages_on_the_disk_are_compared_with_the_disk(self):
        found = points(("disk", "read", 4096, 50_000), ("np", "READ", 8, 60_000), ("np", "READ", 4096, 60_001), ("np", "WRITE", 8, 90_000))
        self.assertEqual([bar.is_met for bar in tables.major_bars(found, "udp")], [True, False])

    def test_other_queue_pairs_are_compared_with_themselves_alone(self):
        found = points(("np", "READ alone", 8, 1000), ("np", "READ beside it on another queue pair", 8, 1101))
        (bar,) = tables.others_bars(found, "udp")
        self.assertFalse(bar.is_met, bar)


if __name__ == "__main__":
    unittest.main()
