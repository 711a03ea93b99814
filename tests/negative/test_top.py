"""`terrace top` on a terminal of 80 columns and 24 lines, and where there is no terminal or no process."""

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
import time
import unittest

import pytest
from support import TERRACE, NegativeTest, assert_refused, connect

COLUMNS, LINES = 80, 24
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>78])")
ENTERS, LEAVES = "\x1b[?1049h", "\x1b[?1049l"


class Screen:
    """A command on a terminal of its own. What it draws is collected; the order of words on the screen is not kept."""

    def __init__(self, argv):
        main, side = pty.openpty()
        self.main, self.drawn = main, ""
        self.resize(COLUMNS)
        self.settings_before = self.settings()
        # A test run behind nohup ignores SIGHUP, and so would the command.
        self.process = subprocess.Popen(argv, stdin=side, stdout=side, stderr=side, start_new_session=True,
                                        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
                                        env={**os.environ, "TERM": "xterm-256color"})
        os.close(side)

    def resize(self, columns):
        """The command draws the whole screen again with its next sample, not only what changes."""
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))

    def settings(self):
        """Those of the terminal, which a command in raw mode has changed."""
        return termios.tcgetattr(self.main)

    def read(self, timeout_s):
        if select.select([self.main], [], [], timeout_s)[0]:
            try:
                self.drawn += os.read(self.main, 65536).decode(errors="replace")
            except OSError:  # EIO: the command has closed its side.
                return False
        return True

    def text(self):
        """What was drawn, without escapes and spaces: blank cells are skipped by moves of the cursor."""
        return re.sub(r"\s", "", ESCAPES.sub("", self.drawn))

    def shows(self, needle, timeout_s=10.0):
        deadline = time.monotonic() + timeout_s
        while needle.replace(" ", "") not in self.text():
            if time.monotonic() > deadline or not self.read(0.1):
                return False
        return True

    def press(self, keys):
        os.write(self.main, keys.encode())

    def end(self, timeout_s=10.0):
        """Waits for the end. Returns the exit status."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read(0.1)
        while self.read(0) and select.select([self.main], [], [], 0)[0]:
            pass
        return self.process.poll()

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.main)


@pytest.mark.alone
class Top(NegativeTest):
    def screen(self, *argv):
        screen = Screen(list(map(str, argv)))
        self.addCleanup(screen.close)
        return screen

    def assert_ended(self, screen):
        self.assertEqual(screen.end(), 0, screen.drawn)
        self.assertIn(LEAVES, screen.drawn, "the terminal has its content again")

    def test_a_process_with_a_queue_pair_is_shown(self):
        left, right = self.start(), self.start()
        for end in (left, right):
            end.mr("m", "anon", 4096)
        connect(left, "q", right, "q")
        screen = self.screen(TERRACE, "top")
        for needle in ("terrace top: ", "q quits", str(left.pid), str(right.pid), "queue pairs", "RTS"):
            self.assertTrue(screen.shows(needle), f"{needle}: {screen.text()}")
        self.assertIn(ENTERS, screen.drawn)
        screen.press("jk")
        has_rates = False
        for columns in range(COLUMNS + 1, COLUMNS + 6):
            screen.resize(columns)
            has_rates = has_rates or screen.shows("retransmits 0", timeout_s=2)
        self.assertTrue(has_rates, "a second sample has rates")
        screen.press("q")
        self.assert_ended(screen)

    def test_one_process_is_shown_until_it_ends(self):
        end, other = self.start(), self.start()
        screen = self.screen(TERRACE, "top", end.pid)
        self.assertTrue(screen.shows(f"process {end.pid} ("), screen.text())
        self.assertNotIn(str(other.pid), screen.text())
        end.stop()
        self.assertTrue(screen.shows("no process runs with Terrace"), screen.text())
        screen.press("\x03")
        self.assert_ended(screen)

    def test_a_signal_restores_the_terminal(self):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            with self.subTest(number.name):
                screen = self.screen(TERRACE, "top", "--interval", "3600")
                self.assertTrue(screen.shows("q quits"), screen.text())
                self.assertNotEqual(screen.settings(), screen.settings_before, "it is raw")
                screen.process.send_signal(number)
                self.assert_ended(screen)
                self.assertEqual(screen.settings(), screen.settings_before)

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("unshare"), "needs root and unshare")
    def test_without_processes_it_says_what_to_do(self):
        screen = self.screen("unshare", "--net", TERRACE, "top")
        for needle in ("no process runs with Terrace", "terrace run -- ib_write_bw", "terrace doctor"):
            self.assertTrue(screen.shows(needle), screen.text())
        screen.press("\x1b")
        self.assert_ended(screen)

    def test_without_a_terminal_or_a_device(self):
        outcome = subprocess.run([TERRACE, "top"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
        assert_refused(self, outcome, 1, "not a terminal: use `terrace stat --watch`")
        screen = self.screen(TERRACE, "top", "1")
        self.assertEqual(screen.end(), 1)
        self.assertIn("process 1 does not run with Terrace", screen.drawn)


if __name__ == "__main__":
    unittest.main()
