"""Invalid command lines: one line with a remedy, an exit status, and no remaining file.

`crates/cli/tests/run.rs` checks the command alone; this is the built one, with its library and real programs.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import unittest

from support import SUCCESS, TERRACE, USAGE, NegativeTest, Endpoint, assert_refused, connect, fresh_address

OWN, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127
INSTANCES = 256
FIRST_PORT = 4791


class Command(NegativeTest):
    def setUp(self):
        self.directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.address = fresh_address()

    def terrace(self, *arguments, **variables):
        return subprocess.run([TERRACE, *map(str, arguments)], cwd=self.directory, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, env={**os.environ, **variables}, timeout=20)

    def refused(self, status, said, *arguments, **variables):
        """The command fails with `status`, prints one line that contains `said`, and leaves no file."""
        before = set(self.directory.iterdir())
        outcome = self.terrace(*arguments, **variables)
        assert_refused(self, outcome, status, said)
        self.assertEqual(set(self.directory.iterdir()), before)
        return outcome.stderr

    def run_refused(self, status, said, *arguments, **variables):
        return self.refused(status, said, "run", "--addr", self.address, *arguments, **variables)

    def file(self, name, content="", mode=0o644):
        path = self.directory / name
        path.write_text(content)
        path.chmod(mode)
        return path

    # ---- the program ----

    def test_unknown_program(self):
        self.run_refused(NOT_FOUND, "no-such-program: no such program in PATH", "--", "no-such-program")
        self.run_refused(NOT_FOUND, "./here: no such program", "--", "./here")
        self.run_refused(NOT_FOUND, "no such program", "--", "")

    def test_program_that_is_not_executable(self):
        self.file("data", "no program")
        self.file("script", "#!/no/such/interpreter\n", 0o755)
        self.run_refused(NOT_EXECUTABLE, "./data: not executable", "--", "./data")
        self.run_refused(NOT_EXECUTABLE, "not executable", "--", self.directory)
        self.run_refused(NOT_EXECUTABLE, "./script: its interpreter does not exist", "--", "./script")

    # ---- the library ----

    def test_missing_library(self):
        for place in ("bin", "lib/terrace"):
            (self.directory / place).mkdir(parents=True)
        command = self.directory / "bin/terrace"
        shutil.copy(TERRACE, command)
        outcome = subprocess.run([command, "run", "--", "true"], capture_output=True, text=True, timeout=20)
        self.assertEqual(outcome.returncode, OWN)
        self.assertIn("the library is missing", outcome.stderr)
        self.assertIn(str(self.directory / "lib/terrace/libibverbs.so.1"), outcome.stderr)
        self.assertEqual(outcome.stderr.count("\n"), 1, outcome.stderr)

    # ---- options ----

    def test_no_arguments(self):
        self.refused(USAGE, "Usage: terrace <COMMAND>")
        self.refused(USAGE, "PROGRAM", "run")
        self.refused(USAGE, "PROGRAM", "run", "--")

    def test_unknown_options_and_commands(self):
        self.refused(USAGE, "'fly'", "fly")
        self.refused(USAGE, "'--frob'", "run", "--frob", "--", "true")
        self.refused(USAGE, "'--frob'", "run", "--frob", "true")
        self.refused(USAGE, "'-x'", "run", "-x", "true")
        self.refused(USAGE, "'--addr <ADDRESS>'", "run", "--addr")
        self.refused(USAGE, "'loud'", "run", "--log", "loud", "--", "true")
        self.refused(USAGE, "'extra'", "devices", "extra")
        self.refused(USAGE, "'x'", "stat", "x")
        # The command does not parse the program's own options.
        outcome = self.terrace("run", "--addr", self.address, "echo", "--frob", "--addr", "-x")
        self.assertEqual((outcome.returncode, outcome.stdout), (0, "--frob --addr -x\n"))

    def test_bad_addresses(self):
        for address, said in (("192.0.2.199", "not an address of this machine"), ("2001:db8::77", "not an address of this machine"),
                              ("255.255.255.255", "not an address of this")):
            with self.subTest(address):
                self.assertIn("--addr", self.refused(OWN, said, "run", "--addr", address, "--", "true"))
        for address, said in (("nonsense", "not an IP address"), ("", "not an IP address"), ("127.0.0.1:80", "not an IP address"),
                              ("127.1", "not an IP address"),
                              ("0.0.0.0", "the wildcard"), ("::", "the wildcard"), ("224.0.0.1", "a multicast address"),
                              ("ff02::1", "a multicast address")):
            with self.subTest(address):
                self.assertIn("--addr", self.refused(USAGE, said, "run", "--addr", address, "--", "true"))
        self.refused(OWN, "not an address of this machine", "run", "--", "true", TERRACE_ADDR="192.0.2.199")
        self.refused(1, "not an address of this machine", "devices", "--addr", "192.0.2.199")
        self.refused(USAGE, "not an IP address", "devices", "--addr", "nonsense")
        self.refused(USAGE, "not an IP address", "doctor", "--addr", "nonsense")

    def test_bad_path_mtus(self):
        for mtu in ("0", "255", "257", "1500", "8192", "-1", "1e3", "", "99999999999999999999"):
            with self.subTest(mtu):
                self.run_refused(USAGE, "choose 256, 512, 1024, 2048 or 4096", f"--mtu={mtu}", "--", "true")
        self.run_refused(USAGE, "choose 256", "--", "true", TERRACE_MTU="77")

    def test_bad_fault_plans(self):
        self.run_refused(USAGE, "none.toml: No such file", "--fault-plan", "none.toml", "--", "true")
        self.run_refused(USAGE, "Is a directory", "--fault-plan", self.directory, "--", "true")
        for number, (content, said) in enumerate((("loss = 1.5", "1.5"), ("loss = -0.1", "-0.1"), ("loss = nan", "loss"),
                                                  ("loss = \"x\"", "loss"), ("lost = 0.1", "lost"), ("loss", "expected"),
                                                  ("delay_us_min = 9\ndelay_us_max = 5", "delay_us"),
                                                  ("[loss]\na = 1", "loss"))):
            with self.subTest(content):
                plan = self.file(f"plan{number}.toml", content)
                self.run_refused(USAGE, said, "--fault-plan", plan, "--", "true")
        plan = self.file("binary.toml")
        plan.write_bytes(bytes(range(256)))
        self.run_refused(USAGE, "binary.toml", "--fault-plan", plan, "--", "true")

    def test_bad_log_levels(self):
        self.refused(USAGE, "[possible values: off, error, warn, info, debug, trace]", "run", "--", "true", TERRACE_LOG="loud")
        library = TERRACE.parents[1] / "lib/terrace/libibverbs.so.1"
        for level, lines in (("loud", 1), ("", 0), ("OFF", 0)):
            with self.subTest(level):
                variables = {**os.environ, "LD_PRELOAD": str(library), "TERRACE_ADDR": self.address, "TERRACE_LOG": level}
                outcome = subprocess.run(["ibv_devinfo"], env=variables, capture_output=True, text=True, timeout=20)
                self.assertEqual((outcome.returncode, outcome.stderr.count("TERRACE_LOG is `loud`, which is not off")), (0, lines))

    def test_unwritable_captures(self):
        self.run_refused(OWN, "No such file or directory", "--pcap", "no/such/directory.pcap", "--", "true")
        self.run_refused(OWN, "Is a directory", "--pcap", self.directory, "--", "true")
        # A thread writes to what is no regular file: the program goes on without the capture.
        end = self.start(None, "--pcap", "/dev/full")
        self.assertIn("the capture to /dev/full ends: No space left on device", end.error_output())

    @unittest.skipUnless(os.geteuid() == 0, "only root can mount a small disk")
    def test_a_full_disk_ends_only_the_capture(self):
        disk = self.directory / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=True)
        self.addCleanup(subprocess.run, ["umount", "--lazy", disk], check=True)
        left, right = self.start(None, "--pcap", disk / "x.pcap"), self.start()
        for end in (left, right):
            region = end.mr("m", "anon", 65536)
        connect(left, "q", right, "q")
        for number in range(8):
            left("post", "q", "write", number, "m", 0, 65536, region["addr"], region["rkey"])
            self.assertEqual(left.poll("q"), [(number, SUCCESS)])
        self.assertIn("capture", left.error_output())
        self.assertEqual(left.error_output().count("\n"), 0, "exactly one line")

    def test_packets_that_the_kernel_drops_are_logged(self):
        """The receive buffer of a stopped process overflows: one line at level info."""
        end = self.start(self.address, "--log", "info")
        os.kill(end.pid, signal.SIGSTOP)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flooder:
            for _ in range(20_000):
                flooder.sendto(bytes(1000), (self.address, FIRST_PORT))
            os.kill(end.pid, signal.SIGCONT)

            def counted():
                flooder.sendto(bytes(1000), (self.address, FIRST_PORT))
                return end.stat()["port"]["rx_overflows"]

            self.eventually(counted, "dropped packets are counted")
        self.eventually(lambda: "receive buffer was full" in end.error_output(), "and logged")
        self.assertEqual(end.error_output().count("receive buffer was full"), 1)

    def test_watching_a_process_takes_its_number(self):
        """README's `stat --watch PID`: the number is the process, not the interval."""
        end = self.start(self.address)
        watch = subprocess.Popen([TERRACE, "stat", "--watch", str(end.pid)], stdout=subprocess.PIPE, text=True)
        self.addCleanup(watch.communicate)
        self.addCleanup(watch.kill)
        self.assertIn(f"process {end.pid} (", watch.stdout.readline())

    def test_statistics_of_missing_processes(self):
        self.refused(1, "process 1 does not run with Terrace", "stat", "1")
        self.refused(1, "process 4294967295 does not run with Terrace", "stat", "4294967295")

    def test_statistics_of_a_stopped_process(self):
        """`terrace stat` does not wait for the process, even if its listen backlog is full."""
        end = self.start(self.address)
        os.kill(end.pid, signal.SIGSTOP)
        self.addCleanup(os.kill, end.pid, signal.SIGCONT)
        self.refused(1, f"process {end.pid} does not answer", "stat", end.pid)
        with contextlib.ExitStack() as askers, self.assertRaises(BlockingIOError):
            while True:
                asker = askers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                asker.connect(f"\0terrace/{end.pid}")
        self.refused(1, f"process {end.pid} does not answer", "stat", end.pid)

    # ---- ports ----

    def occupy(self, ports):
        """Binds UDP ports of the test's address, like another RoCEv2 stack."""
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        for port in ports:
            holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            holder.bind((self.address, port))
        return stack

    def test_a_port_in_use_selects_the_next_instance_index(self):
        self.occupy([FIRST_PORT, FIRST_PORT + 2])
        ends = [self.start(self.address) for _ in range(2)]
        self.assertEqual([end.stat()["udp_port"] for end in ends], [FIRST_PORT + 1, FIRST_PORT + 3])
        for end in ends:
            region = end.mr("m", "anon", 4096)
        connect(*sum(((end, "q") for end in ends), ()))
        ends[0]("post", "q", "write", 1, "m", 0, 4096, region["addr"], region["rkey"])
        self.assertEqual(ends[0].status("q"), SUCCESS)

    def test_no_instance_index_left(self):
        taken = self.occupy(range(FIRST_PORT, FIRST_PORT + INSTANCES))
        said = f"ports {FIRST_PORT} to {FIRST_PORT + INSTANCES - 1} of {self.address} already in use"
        with self.subTest("before the program starts"):
            text = self.refused(OWN, "", "run", "--addr", self.address, "--", "true")
            self.assertIn("already in use", text)
            self.assertIn(str(FIRST_PORT + INSTANCES - 1), text)
            self.assertIn("--addr", text, said)
        with self.subTest("when the program opens the device"):
            library = TERRACE.parents[1] / "lib/terrace/libibverbs.so.1"
            variables = {**os.environ, "LD_PRELOAD": str(library), "TERRACE_ADDR": self.address}
            outcome = subprocess.run(["ibv_devinfo"], env=variables, capture_output=True, text=True, timeout=20)
            self.assertNotEqual(outcome.returncode, 0)
            self.assertIn("already in use", outcome.stderr)
            self.assertIn("Failed to open device", outcome.stderr)
        taken.close()
        self.assertEqual(self.start(self.address).stat()["udp_port"], FIRST_PORT)


if __name__ == "__main__":
    unittest.main()
