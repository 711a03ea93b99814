"""The Grafana dashboard asks for metrics that docs/operations.md lists, and `terrace serve` has those that the page lists."""

import json
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
METRIC = re.compile(r"\bterrace_[a-z_]+\b")
PAGE = (ROOT / "docs/operations.md").read_text()
LISTED = {name for row in re.findall(r"^\| (`terrace_.*?) \|", PAGE, re.MULTILINE) for name in METRIC.findall(row)}


class Dashboard(unittest.TestCase):
    def setUp(self):
        self.dashboard = json.loads((ROOT / "examples/grafana/terrace.json").read_text())

    def test_it_asks_for_listed_metrics(self):
        panels = self.dashboard["panels"]
        asked = {name for panel in panels for target in panel["targets"] for name in METRIC.findall(target["expr"])}
        self.assertGreater(len(asked), 15)
        self.assertEqual(asked - LISTED, set())
        self.assertEqual(len({panel["id"] for panel in panels}), len(panels))

    def test_listed_metrics_exist(self):
        source = (ROOT / "crates/node/src/metrics.rs").read_text()
        self.assertEqual([name for name in sorted(LISTED) if f'"{name.removeprefix("terrace_")}"' not in source and name not in source], [])


if __name__ == "__main__":
    unittest.main()
