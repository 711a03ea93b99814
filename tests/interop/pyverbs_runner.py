"""Runs the tests of pyverbs in one process and writes the outcome of each immediately.

    terrace run -- /usr/bin/python3 pyverbs_runner.py TESTS_DIR RESULTS_FILE [SKIP_COUNT]

Each line of RESULTS_FILE is a JSON object: {"start": NAME} or {"end": NAME, "outcome": "passed|failed|skipped", "why": TEXT}.
If a test crashes the process, the file names it, and the caller starts again behind it with SKIP_COUNT.
"""

import faulthandler
import json
import sys
import unittest
from importlib.machinery import SourceFileLoader


def flatten(suite):
    """The tests of a suite in their order."""
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flatten(item)
        else:
            yield item


class Recorder(unittest.TestResult):
    """Writes every outcome to a file immediately, because the next test may crash."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def record(self, **fields):
        print(json.dumps(fields), file=self.file, flush=True)

    def end(self, test, outcome, why=""):
        self.record(end=test.id(), outcome=outcome, why=why)

    def startTest(self, test):
        super().startTest(test)
        self.record(start=test.id())

    def addSuccess(self, test):
        self.end(test, "passed")

    def addSkip(self, test, reason):
        self.end(test, "skipped", reason)

    def addFailure(self, test, err):
        self.end(test, "failed", self._exc_info_to_string(err, test))

    addError = addFailure

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.addFailure(test, err)


def main():
    tests_dir, results, skip_count = sys.argv[1], sys.argv[2], int((sys.argv + ["0"])[3])
    faulthandler.enable()
    sys.path.insert(0, tests_dir)
    # The suite's modules read their options from this place.
    from args_parser import parser

    sys.argv[1:] = []
    parser.parse_args()
    tests = SourceFileLoader("tests", f"{tests_dir}/__init__.py").load_module()
    chosen = list(flatten(unittest.defaultTestLoader.loadTestsFromModule(tests)))[skip_count:]
    with open(results, "a") as file:
        unittest.TestSuite(chosen).run(Recorder(file))


if __name__ == "__main__":
    main()
