#!/usr/bin/env python3
"""Runs real RDMA programs on Terrace and reports which of them work.

    conformance.py                          everything
    conformance.py 'perftest/ib_read*' ud   cases whose name matches a pattern, or has the word in it
    conformance.py --list                   their names
    conformance.py --published              programs from PyPI and crates.io instead

Every case keeps its programs' output in results/conformance/RUN/CASE/. Exit status 0 when nothing failed.
"""

import argparse
import fnmatch
import json
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "scripts")]

import matrix  # noqa: E402
import published  # noqa: E402
import pyverbs_suite  # noqa: E402
import special  # noqa: E402
from cases import FAILED, PASSED, SKIPPED, Result  # noqa: E402
from harness import procs  # noqa: E402


def main():
    options = parse_options()
    if options.published:
        cases, functions, suite = published.all_cases(), published.SPECIAL, []
    else:
        cases, functions = matrix.all_cases(), special.SPECIAL
        suite = [pyverbs_suite.PREFIX + name for name in pyverbs_suite.passing_names()] or [pyverbs_suite.PREFIX + "all"]
    cases = {case.name: case for case in cases}
    names = [name for name in [*cases, *functions, *suite] if is_chosen(name, options.patterns)]
    if options.list:
        print("\n".join(names))
        return 0
    if not names:
        sys.exit("conformance: no case has such a name (--list shows them)")
    if not procs.terrace_binary().exists():
        sys.exit(f"conformance: {procs.terrace_binary()} is missing: run `make build`")
    procs.exit_on_signals()
    run_dir = procs.new_run_dir("conformance")
    report = Report(options.json, run_dir)
    for name in names:
        if name in cases:
            report.add(cases[name].run(run_dir / name))
        elif name in functions:
            report.add(special.run(name, functions[name], run_dir / name))
    if any(name.startswith(pyverbs_suite.PREFIX) for name in names):
        run_pyverbs(report, run_dir, options)
    return report.close()


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", help="shell patterns or parts of names")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    parser.add_argument("--published", action="store_true", help="run the programs that `make conformance-programs` installs")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, progress to standard error")
    parser.add_argument("--update-pyverbs-list", action="store_true", help="write pyverbs-passing.txt from this run")
    return parser.parse_args()


def is_chosen(name, patterns):
    return not patterns or any(fnmatch.fnmatch(name, pattern) or pattern in name for pattern in patterns)


def run_pyverbs(report, run_dir, options):
    """The suite is one process and always runs completely. The patterns select the reported tests."""
    report.print("pyverbs: running rdma-core's own tests ...")
    started = time.monotonic()
    try:
        outcomes = pyverbs_suite.run(run_dir / "pyverbs")
    except Exception as error:  # an error of the suite is a failure of the run, but the report is still written
        report.add(Result(pyverbs_suite.PREFIX + "suite", FAILED, str(error), time.monotonic() - started))
        return
    if options.update_pyverbs_list:
        pyverbs_suite.update_list(outcomes)
    for result in pyverbs_suite.evaluate(outcomes, pyverbs_suite.passing_names()):
        if is_chosen(result.name, options.patterns):
            report.add(result, quiet=result.status != FAILED and not result.reason.startswith("not in"))
    report.print(f"pyverbs: took {time.monotonic() - started:.0f} s")


class Report:
    """Prints results as they arrive, and the totals at the end."""

    def __init__(self, as_json, run_dir):
        self.as_json, self.run_dir, self.results = as_json, run_dir, []
        self.started = time.monotonic()
        self.print(f"run {run_dir.name}, logs in {run_dir}")

    def print(self, text):
        print(text, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def add(self, result, quiet=False):
        self.results.append(result)
        if not quiet:
            mark = {PASSED: "ok", FAILED: "FAILED", SKIPPED: "skipped"}[result.status]
            self.print(f"{mark:8}{result.seconds:6.1f} s  {result.name}" + (f": {result.reason}" if result.reason else ""))

    def close(self):
        count = {status: sum(result.status == status for result in self.results) for status in (PASSED, FAILED, SKIPPED)}
        flaky = [result for result in self.results if result.is_flaky]
        seconds = time.monotonic() - self.started
        document = {"run": self.run_dir.name, "seconds": round(seconds, 1), **count, "flaky": len(flaky),
                    "results": [result.as_dict() for result in self.results]}
        text = json.dumps(document, indent=1)
        (self.run_dir / "results.json").write_text(text + "\n")
        if self.as_json:
            print(text)
        failed = [result for result in self.results if result.status == FAILED]
        for title, some in (("Flaky", flaky), ("Failed", failed)):
            if some:
                self.print(f"\n{title}:")
            for result in some:
                self.print(f"  {result.name}: {result.reason}")
        self.print(f"\n{seconds:.0f} seconds, logs in {self.run_dir}")
        self.print(f"{count[PASSED]} passed ({len(flaky)} flaky), {count[FAILED]} failed, {count[SKIPPED]} skipped")
        return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
