"""Errors of paged memory equal those of ordinary memory: control operations while requests are under way."""

import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(pathlib.Path(__file__).parent)]

from combinations import breaches, combinations  # noqa: E402
from ends import Pair, Run  # noqa: E402
from harness import procs  # noqa: E402

# A request for absent pages is under way for so long that a control operation meets it.
SLOW = """
[[fault]]
kind = "slow-storage"
operation = "read"
delay_us_min = 2000
"""


class Errors(unittest.TestCase):
    """The combinations over one transport."""

    maxDiff = None
    transport = None

    @classmethod
    def setUpClass(cls):
        directory = cls.enterClassContext(tempfile.TemporaryDirectory(dir="/var/tmp"))
        options = ("--dram", "2M", "--swap", directory)
        slow = pathlib.Path(directory) / "slow.toml"
        slow.write_text(SLOW)
        cls.ordinary = Pair(cls.transport)
        cls.paged = {
            "absent": Pair(cls.transport, *options, "--fault-plan", slow),
            "present": Pair(cls.transport, *options),
            "leaving": Pair(cls.transport, *options, wrapper=("env", "TERRACE_CHURN=1")),
        }
        for pair in (cls.ordinary, *cls.paged.values()):
            cls.addClassCleanup(pair.stop)
        cls.outcomes = {}

    def compare(self, combination):
        expected = self.ordinary_outcome(combination)
        outcome = self.paged[combination.state].run(combination)
        self.assertEqual(breaches(combination, outcome), [], outcome)
        if not combination.is_race and combination.difference is None:
            self.assertEqual(outcome, expected)

    def ordinary_outcome(self, combination):
        """The outcome with ordinary memory: one for all states of pages."""
        known = self.outcomes.get(combination.without_state)
        if known is None:
            known = self.outcomes[combination.without_state] = self.ordinary.run(combination.without_state)
            self.assertEqual(breaches(combination, known), [], f"ordinary memory: {known}")
        return known

    def check_states(self):
        """The pages are in the states that the combinations are named after."""
        for state, pair in self.paged.items():
            pair.start()
            run = Run(pair.ends, combinations(self.transport)[f"{self.transport}_server_fork_before_several_{state}"])
            run.prepare()
            for side, end in pair.ends.items():
                region = region_of(end, run.regions[side]["addr"])
                if state == "absent":
                    # `prepare` has asked the kernel. A few pages behind the span may have been read ahead: it was filled in order.
                    procs.wait_until(lambda: region_of(end, region["addr"])["resident_bytes"] < run.span // 8, f"the {side}'s pages leave")
                elif state == "present":
                    self.assertGreaterEqual(region["resident_bytes"], run.span, side)
                else:
                    procs.wait_until(lambda: region_of(end, region["addr"])["evictions"] > 0, f"pages of the {side} leave")
            run.act()
            run.client.poll("q", len(run.requests))
            if state == "absent":
                self.assertGreater(region_of(run.server, run.remote["addr"])["misses"], 0)
            run.clean()


def region_of(end, address):
    """The statistics of a paged region."""
    (found,) = [region for region in end.stat()["memory"]["regions"] if region["addr"] == address]
    return found


class Udp(Errors):
    transport = "udp"


class Local(Errors):
    transport = "local"


def _add_tests(case):
    def test_of(combination):
        return lambda self: self.compare(combination)

    for name, combination in combinations(case.transport).items():
        setattr(case, f"test_{name}", test_of(combination))
    setattr(case, f"test_{case.transport}_states_of_pages", case.check_states)


_add_tests(Udp)
_add_tests(Local)
del Errors

if __name__ == "__main__":
    unittest.main()
