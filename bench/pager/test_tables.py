"""Tests of the tables."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import tables


def program(seconds, is_right=True, **more):
    run = {"seconds": seconds, "is_right": is_right, "most_bytes": 50 << 20, **more}
    return {"bytes": 100 << 20, "all local": {"100": [{"seconds": 2.0}]}, "far, UDP": {"75": [run], "50": [run, run]}}


def test_times_are_medians_over_all_local():
    results = {"programs": {"quicksort": program(3.0)}, "reads": {}}
    assert "| far, UDP | 3.00 | 1.50 | 3.00 | 1.50 | 50 % |" in tables.tables(results)
    assert "1.50" in tables.plot(results)


def test_a_wrong_result_is_a_failure():
    results = {"programs": {"quicksort": program(3.0, is_right=False)}, "reads": {}}
    assert "| far, UDP | failed (1 of 1 failed) | failed | failed (2 of 2 failed) | failed |" in tables.tables(results)
    assert tables.plot(results) is None


def test_faults_are_beside_a_read_of_the_same_path():
    results = {"programs": {"random touches": program(1.0, p50_us=30.0, p99_us=60.0)},
               "reads": {"UDP": {"p50_us": 22.0, "p99_us": 41.0}}}
    assert "| far, UDP | 30.0 | 60.0 | 22.0 | 41.0 | +8.0 |" in tables.tables(results)


def test_memory_nodes_are_beside_the_static_one_of_their_transport():
    def runs(seconds):
        return {share: [{"seconds": seconds, "is_right": True}] for share in ("75", "50")}

    found = {**program(3.0), "far, UDP": runs(3.0), "far, UDP, static": runs(2.5), "far, within the host": runs(2.0),
             "far, UDP, no prefetch": runs(9.0), "far, UDP, two-sided": runs(5.0)}
    text = tables.tables({"programs": {"quicksort": found}, "reads": {}}).partition("over that of")[2]
    assert "| far, UDP | +20 % | +20 % |" in text and "| far, UDP, two-sided | +100 % | +100 % |" in text
    assert "within the host" not in text and "prefetch" not in text
    assert tables.static_table("quicksort", program(3.0)) == []
