"""What the benchmarks of this directory have in common: options, results, and programs that measure what they are told."""

import argparse
import json
import pathlib
import subprocess
import sys

import bench
from harness import procs


class Program:
    """A process that measures what it is told, a line each."""

    def __init__(self, stack, *argv):
        self.process = stack.enter_context(subprocess.Popen(list(map(str, argv)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        stack.callback(self.process.stdin.close)
        self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"bench: {' '.join(self.process.args)} ended with status {self.process.wait()}")
        return json.loads(line)

    def run(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._answer()


def parser(description):
    """A parser of command lines with the common options."""
    common = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("/var/tmp"), help="a directory on the disk (default /var/tmp)")
    common.add_argument("--out", type=pathlib.Path, help="directory of the results (default results/bench-filemr/TIME)")
    common.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    return common


def directory(options):
    """The directory of the results, which is made."""
    out = options.out or procs.new_run_dir("bench-filemr")
    out.mkdir(parents=True, exist_ok=True)
    return out


def document(program, **content):
    """A document of results: how, where and what."""
    return {"command": " ".join([f"bench/filemr/{program}", *sys.argv[1:]]), "machine": bench.machine(), **content}


def write(options, out, names, content, page):
    """Writes a document and its tables to files of these names, and prints one of the two."""
    text = json.dumps(content, indent=1)
    for name, of in zip(names, (text, page), strict=True):
        (out / name).write_text(of + "\n")
    print(text if options.json else f"{page}\nresults in {out}")
