"""`terrace run --remote-memory`: the pager beside the program."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

from support import NegativeTest, fresh_address, procs

PROGRAM_CODE = """
numbers = bytearray(64 << 20)
for at in range(0, len(numbers), 4096):
    numbers[at : at + 8] = at.to_bytes(8, "little")
print("filled", flush=True)
input()
print(all(numbers[at : at + 8] == at.to_bytes(8, "little") for at in range(0, len(numbers), 4096)))
"""


def pager_of(pid):
    """The process that pages the memory of a program."""
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"pager" in words and b"--root" in words and words[words.index(b"--root") + 1] == str(pid).encode():
            return int(entry.name)
    raise ProcessLookupError(f"process {pid} has no pager")


@unittest.skipUnless(os.geteuid() == 0, "userfaultfd(2) with fork events needs root")
class Signals(NegativeTest):
    def test_a_pager_is_not_ended_by_signals_for_all_processes(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        options = ("--remote-memory", f"file:{directory}", "--local", "16M")
        command = procs.under_terrace([sys.executable, "-c", PROGRAM_CODE], *options, addr=fresh_address())
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            self.addCleanup(program.kill)
            self.assertEqual(program.stdout.readline(), "filled\n")
            pager = pager_of(program.pid)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pager, number)
            self.assertEqual(program.communicate("\n", timeout=60)[0], "True\n")
            self.assertEqual(program.returncode, 0)
