"""Tests of `make bench-peers`: medians, spread, ratios, the list of faster peers; and that the plan can be run."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import chart  # noqa: E402
import lineup  # noqa: E402
import results  # noqa: E402


def row(peer, rate, p50_ns=None, **changes):
    base = {"section": "main", "peer": peer, "op": "get", "size": 8, "depth": 1, "threads": 1, "ops": 100, "rate": rate, "p50_ns": p50_ns,
            "p99_ns": p50_ns, "client_cpu_s": 1e-6, "target_cpu_s": 0.0, "target_ticks": 0}
    return results.with_cpu_ns({**base, **changes})


class Summary(unittest.TestCase):
    def test_rounds_become_a_median_and_a_spread(self):
        (entry,) = results.summarise([row("a", rate, p50) for rate, p50 in ((10.0, 300), (30.0, 100), (20.0, 200))])
        self.assertEqual((entry["rounds"], entry["rate"], entry["p50_ns"], entry["rate_spread"]), (3, 20.0, 200, 1.0))

    def test_processor_time_is_for_each_operation(self):
        entry = row("a", 1.0, client_cpu_s=2e-3, target_cpu_s=1e-3, ops=1000)
        self.assertAlmostEqual(entry["client_cpu_ns"], 2000)
        self.assertAlmostEqual(entry["target_cpu_ns"], 1000)

    def test_points_without_latency_have_none(self):
        (entry,) = results.summarise([row("a", 5.0)])
        self.assertEqual((entry["p50_ns"], entry["p50_ns_spread"]), (None, None))


class Ratios(unittest.TestCase):
    def summary(self):
        rows = [row(lineup.REFERENCE, 50.0, 100), row("ucx-posix", 100.0, 400), row("redis", 25.0, 50)]
        rows += [row("ucx-posix", 100.0, depth=16), row(lineup.REFERENCE, 50.0, depth=16), row("nbd", 1.0, 1, size=64)]
        return results.add_ratios(results.summarise(rows), lineup.REFERENCE)

    def test_above_one_is_ahead_for_every_metric(self):
        entry = results.find(self.summary(), peer="ucx-posix", depth=1)
        self.assertEqual((entry["p50_ns_ratio"], entry["rate_ratio"]), (4.0, 0.5))

    def test_points_that_the_reference_lacks_have_no_ratio(self):
        self.assertIsNone(results.find(self.summary(), peer="nbd")["rate_ratio"])

    def test_better_peers_are_listed_with_the_worst_ratio_first(self):
        found = [(entry["peer"], metric, entry["depth"], ratio) for entry, metric, ratio in results.not_ahead(self.summary(), lineup.PEERS)]
        self.assertEqual(found, [("redis", "p50_ns", 1, 0.5), ("redis", "p99_ns", 1, 0.5), ("ucx-posix", "rate", 16, 0.5)])

    def test_a_promise_that_was_not_measured_is_not_met(self):
        self.assertFalse(any(promise["met"] for promise in results.promises([])))

    def test_promises_are_judged_by_their_thresholds(self):
        large = {"section": "large", "size": 4096, "depth": 16}
        rows = [row(lineup.REFERENCE, 70.0, **large), row("memcpy-shared", 100.0, **large), row(lineup.REFERENCE, 50.0, 251)]
        rows += [row(lineup.REFERENCE, 1.0, 190, op="message", size=64), row("shm", 1.0, 100, op="message", size=64)]
        met = {promise["text"]: (promise["value"], promise["met"]) for promise in results.promises(results.summarise(rows))}
        self.assertEqual(met["get of 4 KiB from 2 GiB, verbs, depth 16: share of memcpy's rate"], (0.7, True))
        self.assertEqual(met["get of 8 B from 256 MiB, verbs: p50, ns"], (251, False))
        self.assertEqual(met["message of 64 B, verbs: round trip over that of bare shared memory"], (1.9, True))


    def test_latencies_have_that_of_memcpy(self):
        summary = results.summarise([row(lineup.REFERENCE, 1.0, 251), row("memcpy-shared", 1.0, 240)])
        memcpy = {promise["text"]: promise["memcpy"] for promise in results.promises(summary)}
        self.assertEqual(memcpy["get of 8 B from 256 MiB, verbs: p50, ns"], 240)
        self.assertIsNone(memcpy["get of 8 B from 1 MiB, verbs: p50, ns"])


class Tables(unittest.TestCase):
    def test_a_missing_value_has_its_reason(self):
        summary = results.add_ratios(results.summarise([row(lineup.REFERENCE, 1.0, 1500), row("redis", 1.0, 30000)]), lineup.REFERENCE)
        text = results.tables(summary, lineup.PEERS, {("main", "nbd"): "nbdkit is not installed"})
        self.assertIn("| Redis, unix socket | 30 us (20) |", text)
        self.assertIn("| NBD (nbdkit memory), unix socket | *missing* |", text)

    def test_a_value_of_several_rounds_shows_its_spread(self):
        summary = results.summarise([row(lineup.REFERENCE, 1.0, p50) for p50 in (900, 1000, 1100)])
        self.assertIn("1 us ±10%", results.tables(results.add_ratios(summary, lineup.REFERENCE), lineup.PEERS, {}))

    def test_sizes_have_the_largest_unit(self):
        self.assertEqual([results.size_name(size) for size in (8, 4096, 1 << 20)], ["8 B", "4 KiB", "1 MiB"])


class Plan(unittest.TestCase):
    def test_the_reference_is_a_peer_and_names_are_unique(self):
        names = [peer.name for peer in lineup.PEERS]
        self.assertIn(lineup.REFERENCE, names)
        self.assertEqual(len(names), len(set(names)))

    def test_programs_accept_all_points(self):
        for section in (*lineup.SHORT, *lineup.FULL):
            self.assertLessEqual(set(section.peers), {peer.name for peer in lineup.PEERS})
            self.assertLessEqual(len(section.points), 256)
            for op, size, depth, threads in section.points:
                self.assertTrue(size % 8 == 0 and 0 < size <= 1 << 20 and 0 < depth <= 16 and threads in (1, 2), (op, size, depth, threads))


class Chart(unittest.TestCase):
    def test_each_peer_with_points_is_a_line(self):
        picture = chart.render("get", {"a": [(8, 1.0), (4096, 2.0)], "b": [(8, 3.0)], "none": []}, "us")
        self.assertEqual(picture.count("<polyline"), 2)
        self.assertIsNone(chart.render("get", {"none": []}, "us"))


if __name__ == "__main__":
    unittest.main()
