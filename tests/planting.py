"""Mutation tests: faults are planted into a copy of Terrace, one at a time, and a suite has to find each of them. The faults, and how a suite
is run, are in models/mutants.py and sim/mutants.py.

A fault replaces a text that occurs exactly once: (group, name, file, text, replacement). The group may be empty.
"""

import argparse
import fnmatch
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


def parser(description):
    """The options of every such suite."""
    options = argparse.ArgumentParser(description=description.splitlines()[0])
    options.add_argument("--work", help="directory for the compiled code, which is kept")
    options.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN", help="names or groups of faults (default: all)")
    return options


def copy_tree(work):
    """Copies the current sources, committed or not. An identical file keeps its time, and a file that differs gets a new
    time, because cargo compiles files that are newer than its last build."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard",
                             "Cargo.toml", "Cargo.lock", "crates", "tests/corpus", "tests/packets", "tests/sim"],
                            cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().split("\0"):
        if not name or not (ROOT / name).is_file():
            continue
        source, copy = (ROOT / name).read_bytes(), work / name
        if not copy.is_file() or copy.read_bytes() != source:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source)


def run(work, *command):
    environment = os.environ | {"CARGO_TARGET_DIR": str(work / "target"), "RUST_BACKTRACE": "0"}
    return subprocess.run(command, cwd=work, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def build(work, *command):
    """Runs a command that compiles the copy; exits when it fails."""
    built = run(work, *command)
    if built.returncode != 0:
        sys.exit(f"does not compile:\n{built.stdout}")


def plant_all(faults, arguments, find):
    """Plants the faults. `find(work, group)` returns what a suite has found, or `None`. Returns the exit status."""
    def is_chosen(group, name):
        return any(fnmatch.fnmatch(name, pattern) or pattern == group for pattern in arguments.patterns)

    if not any(is_chosen(group, name) for group, name, *_ in faults):
        sys.exit(f"no fault matches {' or '.join(arguments.patterns)}")
    work = pathlib.Path(arguments.work or tempfile.mkdtemp(prefix="terrace-mutants-"))
    survivors = []
    try:
        copy_tree(work)
        for group, name, path, old, new in faults:
            if not is_chosen(group, name):
                continue
            started, file = time.monotonic(), work / path
            original = file.read_text()
            if original.count(old) != 1:
                sys.exit(f"{name}: the text occurs {original.count(old)} times; fix the table")
            file.write_text(original.replace(old, new))
            found = find(work, group)
            file.write_text(original)
            survivors += [] if found else [name]
            print(f"{group} {name}: {(found or 'NOT FOUND')[:150]} ({time.monotonic() - started:.0f} s)".lstrip(), flush=True)
    finally:
        if not arguments.work:
            shutil.rmtree(work, ignore_errors=True)
    print(f"{len(survivors)} not found" if survivors else "all found")
    return 1 if survivors else 0


class TableTest:
    """The table of faults matches the source. A suite of faults is run by hand, so only this test detects a changed text."""

    maxDiff = None
    FAULTS = []

    def test_each_text_occurs_exactly_once(self):
        counts = {name: (ROOT / path).read_text().count(text) for _, name, path, text, _ in self.FAULTS}
        self.assertEqual({name: count for name, count in counts.items() if count != 1}, {}, "fix the table in mutants.py")

    def test_each_replacement_differs(self):
        self.assertEqual([name for _, name, _, text, replacement in self.FAULTS if text == replacement], [])

    def test_names_are_unique(self):
        names = [name for _, name, *_ in self.FAULTS]
        self.assertEqual(len(names), len(set(names)))
