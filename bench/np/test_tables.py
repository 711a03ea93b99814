"""The thresholds of `make bench-np`."""

import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "peers")]

import tables  # noqa: E402


def points(*rows):
    """Of latencies whose slices are given."""
    names = ("case", "op", "size", "slices")
    return tables.Points({"points": [{**dict(zip(names, row)), "p50_ns": row[-1][0]} for row in rows]})


def rates(*rows):
    names = ("case", "op", "size", "slices")
    return tables.Points({"points": [{**dict(zip(names, row)), "rate": row[-1][0]} for row in rows]})


class Thresholds(unittest.TestCase):
    def test_present_pages_may_cost_three_percent_or_fifty_nanoseconds(self):
        for pin, np, is_met in ((1000, 1050, True), (1000, 1051, False), (10_000, 10_300, True), (10_000, 10_301, False)):
            (bar,) = tables.present_bars(points(("pin", "READ", 8, [pin]), ("np", "READ", 8, [np])), "udp")
            self.assertEqual(bar.is_met, is_met, bar)

    def test_slices_are_compared_with_those_beside_them(self):
        found = points(("pin", "READ", 8, [1000, 9000, 1000]), ("np", "READ", 8, [1010, 9090, 1900]))
        (bar,) = tables.present_bars(found, "udp")
        self.assertTrue(bar.is_met, bar)

    def test_writes_have_the_rate_of_pinned_memory_or_half_of_it_if_signalled(self):
        for op, size, rate, is_met in (("unsignalled WRITEs", 4096, 96, False), ("unsignalled WRITEs", 4096, 97, True),
                                       ("signalled WRITEs", 8, 50, True), ("signalled WRITEs", 8, 49, False)):
            (bar,) = tables.present_bars(rates(("pin", op, size, [100]), ("np", op, size, [rate])), "udp")
            self.assertEqual(bar.is_met, is_met, bar)
        self.assertEqual(tables.present_bars(rates(("pin", "signalled WRITEs", 4096, [100]), ("np", "signalled WRITEs", 4096, [1])), "udp"), [])

    def test_first_touches_are_compared_with_memory_that_was_touched(self):
        found = points((tables.TOUCHED, "WRITE", 8, [8000]), ("pin", "WRITE", 8, [9000]), ("np", "WRITE", 8, [14_001]))
        (bar,) = tables.minor_bars(found, "udp")
        self.assertFalse(bar.is_met, bar)
        self.assertEqual(tables.minor_bars(found, "local"), [])

    def test_pages_on_the_disk_are_compared_with_the_disk_at_that_time(self):
        disk = [50_000] * 10 + [90_000] * 10 + [50_000] * 10
        found = points(("disk", "read", 4096, disk), ("np", "READ", 8, [60_000] * 10), ("np", "WRITE", 8, [1]), ("np", "READ", 4096, [60_001] * 10))
        self.assertEqual([bar.is_met for bar in tables.major_bars(found, "udp")], [True, False])

    def test_other_reads_are_compared_with_themselves_alone(self):
        for same, other, expected in ((1100, 1030, [True, True]), (1101, 1031, [False, False])):
            found = points(("np", tables.ALONE, 8, [1000]), ("np", tables.SAME, 8, [same]), ("np", tables.OTHER, 8, [other]))
            self.assertEqual([bar.is_met for bar in tables.others_bars(found, "udp")], expected)


if __name__ == "__main__":
    unittest.main()
