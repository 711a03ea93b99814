"""`terrace run --remote-memory`: the pager beside the program."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

from support import TERRACE, NegativeTest, assert_refused, fresh_address, procs

PROGRAM_CODE = """
numbers = bytearray(64 << 20)
for at in range(0, len(numbers), 4096):
    numbers[at : at + 8] = at.to_bytes(8, "little")
print("filled", flush=True)
input()
print(all(numbers[at : at + 8] == at.to_bytes(8, "little") for at in range(0, len(numbers), 4096)))
"""

# Memory that cannot leave, twice the budget: the pager logs a line.
LOCKED_CODE = """
import ctypes, mmap
numbers = mmap.mmap(-1, 32 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
place = ctypes.c_char.from_buffer(numbers)
assert ctypes.CDLL(None).mlock(ctypes.byref(place), ctypes.c_size_t(len(numbers))) == 0
numbers[::4096] = b"a" * (len(numbers) // 4096)
print("filled" if set(numbers[::4096]) == {ord("a")} else "wrong", flush=True)
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
class Sockets(NegativeTest):
    """The directory of the pager's socket."""

    def run_in(self, temporary, *command):
        """Runs a program whose memory is in a file, with this TMPDIR."""
        options = ("--remote-memory", f"file:{self.enterContext(tempfile.TemporaryDirectory())}", "--local", "16M")
        argv = procs.under_terrace(command, *options, addr=fresh_address())
        return subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(temporary)}, timeout=60)

    def test_a_directory_that_the_socket_does_not_fit_into_is_named_and_nothing_stays(self):
        directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), "x" * 100)
        directory.mkdir()
        for temporary in (directory, directory / "none"):
            with self.subTest(temporary.name):
                outcome = self.run_in(temporary, "true")
                assert_refused(self, outcome, 125, f"cannot make the pager's socket {temporary}/terrace-pager-")
                self.assertIn("TMPDIR", outcome.stderr)
        self.assertEqual(list(directory.iterdir()), [])

    def test_an_empty_tmpdir_counts_as_unset_and_abandoned_directories_go(self):
        """A pager that was killed with its program has left a socket that nobody listens at."""
        temporary = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        ended = subprocess.Popen(["true"])
        ended.wait()
        abandoned, living = temporary / f"terrace-pager-{ended.pid}-0", temporary / f"terrace-pager-{os.getpid()}-0"
        for directory in (abandoned, living):
            directory.mkdir()
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(directory / "socket"))
        outcome = self.run_in(temporary, sys.executable, "-c", "print('ended')")
        self.assertEqual((outcome.returncode, outcome.stdout), (0, "ended\n"), outcome.stderr)
        self.assertFalse(abandoned.exists())
        self.assertTrue(living.exists())
        outcome = self.run_in("", "sh", "-c", "echo $TERRACE_PAGER")
        self.assertTrue(outcome.stdout.startswith("/tmp/terrace-pager-"), (outcome.stdout, outcome.stderr))


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


@unittest.skipUnless(os.geteuid() == 0, "userfaultfd(2) with fork events needs root")
class Log(NegativeTest):
    """The pager's log goes to the standard error of its program."""

    def test_a_program_goes_on_although_its_pager_cannot_write(self):
        reader, full = os.pipe()
        os.set_blocking(full, False)
        while True:
            try:
                os.write(full, b"x" * 4096)
            except BlockingIOError:
                break
        os.set_blocking(full, True)
        self.addCleanup(os.close, reader)
        options = ("--remote-memory", f"file:{self.enterContext(tempfile.TemporaryDirectory())}", "--local", "16M")
        command = procs.under_terrace([sys.executable, "-c", LOCKED_CODE], *options, addr=fresh_address())
        for errors in (full, os.open("/dev/full", os.O_WRONLY)):
            with self.subTest(errors=os.readlink(f"/proc/self/fd/{errors}")):
                outcome = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=60)
                self.assertEqual((outcome.returncode, outcome.stdout), (0, "filled\n"))
            os.close(errors)

    def test_the_loss_of_a_node_is_logged(self):
        nodes = [f"{fresh_address()}:7474" for _ in range(2)]
        started = [subprocess.Popen([TERRACE, "memory-node", "--memory", "96M", "--listen", node], stdout=subprocess.PIPE)
                   for node in nodes]
        for node in started:
            self.addCleanup(node.communicate)
            self.addCleanup(node.kill)
            self.assertTrue(node.stdout.readline())
        options = ("--remote-memory", ",".join(nodes), "--mirror", "2", "--local", "16M")
        command = procs.under_terrace([sys.executable, "-c", PROGRAM_CODE], *options, addr=fresh_address())
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as program:
            self.addCleanup(program.kill)
            self.assertEqual(program.stdout.readline(), "filled\n")
            started[1].kill()
            output, errors = program.communicate("\n", timeout=60)
        self.assertEqual((program.returncode, output), (0, "True\n"), errors)
        lost = [line for line in errors.splitlines() if "a memory node is lost" in line and nodes[1] in line]
        self.assertEqual(len(lost), 1, errors)
