"""rdma-core's own Python tests, compared by name with the committed list of those that pass."""

import fnmatch
import gzip
import json
import pathlib
import shutil
import subprocess
import time

from cases import FAILED, PASSED, SKIPPED, Result
from harness import hugepages, procs

HERE = pathlib.Path(__file__).resolve().parent
PASSING_LIST = HERE / "pyverbs-passing.txt"
SKIPPED_LIST = HERE / "pyverbs-skipped.txt"
PACKAGED_TESTS = "usr/share/doc/rdma-core/tests"
# The suite is built for the distribution's Python, which need not be the first in the PATH.
PYTHON = "/usr/bin/python3"
PREFIX = "pyverbs/"
HANG_TIMEOUT_S = 60  # a test without output for this long is considered hung

HUGE_PAGES_COUNT = 24  # more than the suite's tests need at a time
NO_HUGE_PAGES = "There are no huge pages"


def passing_names():
    """The tests that must pass."""
    lines = PASSING_LIST.read_text().splitlines() if PASSING_LIST.exists() else []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def skip_reasons():
    """[(pattern, reason)] of the tests that may be skipped."""
    lines = (line.strip() for line in SKIPPED_LIST.read_text().splitlines())
    return [tuple(part.strip() for part in line.split("|", 1)) for line in lines if line and not line.startswith("#")]


def unpack(destination):
    """Unpacks the suite for Python: Debian ships the larger files compressed."""
    source = pathlib.Path("/") / PACKAGED_TESTS
    if not source.is_dir():
        source = _from_package(destination.parent) / PACKAGED_TESTS
    destination.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".gz":
            (destination / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
        elif file.suffix == ".py":
            shutil.copy(file, destination)


def _from_package(directory):
    """Gets the files from the package, because minimal images omit /usr/share/doc."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "rdma-core"], cwd=directory, check=True, capture_output=True)
    package = next(directory.glob("rdma-core_*.deb"))
    subprocess.run(["dpkg-deb", "--extract", package, directory / "package"], check=True)
    return directory / "package"


def run(log_dir):
    """Runs the whole suite. Returns {name: (outcome, why, seconds)}."""
    with hugepages.reserve(HUGE_PAGES_COUNT):
        return _run(log_dir)


def _run(log_dir):
    tests_dir, results_file = log_dir / "tests", log_dir / "results.jsonl"
    unpack(tests_dir)
    results_file.touch()
    done, attempt = {}, 0
    while True:
        attempt += 1
        command = [PYTHON, str(HERE / "pyverbs_runner.py"), str(tests_dir), str(results_file), str(len(done))]
        program = procs.Program(procs.under_terrace(command), log_dir, f"run-{attempt}")
        ended = _watch(program, results_file)
        before = len(done)
        done = _read(results_file)
        if ended and program.process.returncode == 0:
            return done
        victim = next((name for name, (outcome, *_) in done.items() if outcome is None), None)
        how = program.outcome(stopped=not ended).verdict
        if victim is None and len(done) == before:
            raise RuntimeError(f"the suite does not start: {how}; see {log_dir}/run-{attempt}.err")
        if victim is not None:
            with open(results_file, "a") as file:
                print(json.dumps({"end": victim, "outcome": "failed", "why": f"the process {how}"}), file=file)
            done = _read(results_file)


def _watch(program, results_file):
    """Waits for the end. Returns False if a test hung and was stopped."""
    size, changed = -1, time.monotonic()
    while program.wait(0.2) is None:
        now_size = results_file.stat().st_size
        if now_size != size:
            size, changed = now_size, time.monotonic()
        if time.monotonic() - changed > HANG_TIMEOUT_S:
            program.stop(is_late=True)
            return False
    return True


def _read(results_file):
    done = {}
    for line in results_file.read_text().splitlines():
        record = json.loads(line)
        if "start" in record:
            done[record["start"]] = (None, "", 0.0)
        elif record["end"] in done or record["outcome"] == "skipped":
            first = done.get(record["end"], (None, "", 0.0))
            # A test can end twice (its body and its clean-up): one failure suffices.
            if first[0] != "failed":
                done[record["end"]] = (record["outcome"], record["why"], 0.0)
    return done


def evaluate(outcomes, expected):
    """One result per expected name, and one per test outside of the list."""
    results, reasons = [], skip_reasons()
    for name in expected:
        outcome, why, _ = outcomes.get(name, ("missing", "", 0.0))
        if outcome == "passed":
            results.append(Result(PREFIX + name, PASSED))
        elif outcome == "skipped" and NO_HUGE_PAGES in why:
            results.append(Result(PREFIX + name, SKIPPED, "no huge pages, and only root can reserve some"))
        else:
            results.append(Result(PREFIX + name, FAILED, f"passed before, now {outcome}: {_last_line(why)}"))
    for name, (outcome, why, _) in outcomes.items():
        if name in expected:
            continue
        if outcome == "failed":
            results.append(Result(PREFIX + name, FAILED, _last_line(why)))
        elif outcome == "passed":
            results.append(Result(PREFIX + name, PASSED, "not in pyverbs-passing.txt yet (--update-pyverbs-list)"))
        else:
            reason = next((reason for pattern, reason in reasons if fnmatch.fnmatch(name, pattern)), None)
            unlisted = f"skipped, and not in pyverbs-skipped.txt: {_last_line(why)}"
            results.append(Result(PREFIX + name, SKIPPED if reason else FAILED, reason or unlisted))
    return results


def update_list(outcomes):
    """Writes the names of all tests that passed."""
    names = sorted(name for name, (outcome, *_) in outcomes.items() if outcome == "passed")
    header = (
        "# Tests of rdma-core's pyverbs suite (Debian 12: 44.0) that pass. `make conformance` fails when one of these does not.\n"
        "# Written by: build/tools/bin/pytest tests/interop/test_conformance.py -k pyverbs/ --update-pyverbs-list\n"
    )
    PASSING_LIST.write_text(header + "".join(name + "\n" for name in names))


def _last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
