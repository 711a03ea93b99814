"""Pairs of programs that verify their data, several at a time, under settings drawn at random. Their processes are stopped for moments.

More processes than processors, stops, losses and evictions show orders of events that a test of one pair on an idle machine does not.
`make stress MINUTES=n SEED=k` draws the settings from the seed; which moments a process is stopped at depends on the machine, too.
"""

import concurrent.futures
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from harness import procs  # noqa: E402

PROGRAM = ROOT / "build/interop/programs/paged_stress"
LOSSY = ROOT / "tests/interop/lossy.toml"
SECONDS = int(os.environ.get("TERRACE_STRESS_SECONDS", "60"))
SEED = int(os.environ.get("TERRACE_SEED", "1"))
# Two processes each.
PAIRS_AT_A_TIME = os.cpu_count() or 1
DRIVE_S = 4
# A lossy pair takes some 30 s, of which most are acknowledgement timeouts.
LIMIT_S = 240
STOPS_S = (0.001, 0.003, 0.01, 0.05)
PAGE, MIB = 4096, 1 << 20


class Settings:
    """What one pair runs with: the environment of each process, and the options of `terrace run`."""

    def __init__(self, rng):
        is_commodity, is_lossy = rng.random() < 0.5, rng.random() < 0.4
        self.mib, self.seed = 32, rng.randrange(1 << 30)
        self.server = ["--dram", rng.choice(("1M", "2M", "8M"))]
        self.client, self.environments = [], [self._environment(rng, is_commodity) for _ in range(2)]
        if rng.random() < 0.5:
            self.environments[0]["TERRACE_CHURN"] = "1"
        for options in (self.server, self.client):
            options += ["--nic", "commodity"] if is_commodity else []
            options += ["--fault-plan", str(LOSSY)] if is_lossy else []

    @staticmethod
    def _environment(rng, is_commodity):
        drawn = {"TERRACE_PATH": ("auto", "auto", "udp"), "TERRACE_MTU": ("4096", "4096", "1024")}
        if is_commodity:
            drawn |= {"TERRACE_NP_REVERSE": ("on", "off"), "TERRACE_NP_ORDER": ("default", "strict"),
                      "TERRACE_NP_INLINE": ("0", "1000", "4096"), "TERRACE_NP_UNCHECKED": ("1", "64"),
                      "TERRACE_NP_CHECK_DELAY_US": ("0", "100", "5000")}
        return {name: rng.choice(values) for name, values in drawn.items()}


class Pair:
    """A server, whose file is many times larger than its memory budget, and its driver."""

    def __init__(self, number, settings, log_dir):
        self.settings, self.log_dir = settings, log_dir
        self.port = procs.free_port()
        self.addresses = [f"127.{80 + number % 16}.{os.getpid() % 250}.{end}" for end in (1, 2)]
        self.programs = []

    def start(self, file):
        settings, port = self.settings, str(self.port)
        serve = [PROGRAM, "serve", "-p", port, "-m", str(settings.mib), "-s", str(settings.seed), file]
        self._start("server", procs.under_terrace(serve, *settings.server, addr=self.addresses[0]))
        procs.wait_until(lambda: procs.is_listening(self.port) or self._has_failed(), "the server listens", 60)
        drive = [PROGRAM, "drive", "-p", port, "-t", str(DRIVE_S), self.addresses[0]]
        self._start("driver", procs.under_terrace(drive, *settings.client, addr=self.addresses[1]))

    def _start(self, name, argv):
        environment = self.settings.environments[len(self.programs)]
        self.programs.append(procs.Program(argv, self.log_dir, name, environment))

    def _has_failed(self):
        return any(program.process.poll() not in (None, 0) for program in self.programs)

    def run(self, rng):
        """Stops processes for moments until both have ended. Returns what is wrong, or nothing."""
        deadline = time.monotonic() + LIMIT_S
        try:
            while any(program.process.poll() is None for program in self.programs) and not self._has_failed():
                if time.monotonic() > deadline:
                    return f"not ended in {LIMIT_S} s: {self}"
                stop_for_a_moment(rng.choice(self.programs).process, rng.choice(STOPS_S))
                time.sleep(rng.uniform(0, 0.06))
            for program in self.programs:
                program.wait(5)
            return None if not self._has_failed() else f"{self}\n{self._output()}"
        finally:
            procs.stop_all(self.programs, are_late=True)

    def _output(self):
        return "\n".join(program.outcome().text.strip()[-500:] for program in self.programs)

    def __str__(self):
        commands = (program.argv for program in self.programs)
        lines = (" ".join([*(f"{name}={value}" for name, value in environment.items()), *argv])
                 for environment, argv in zip(self.settings.environments, commands))
        return f"{self.log_dir}\n" + "\n".join(lines)


def stop_for_a_moment(process, seconds):
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)


class Stress(unittest.TestCase):
    def setUp(self):
        self.results = procs.new_run_dir("stress")
        self.directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(dir="/var/tmp")))

    def test_all_data_is_right(self):
        end = time.monotonic() + SECONDS

        def run_pairs(worker):
            rng, count, complaints = random.Random(SEED * 1000 + worker), 0, []
            while time.monotonic() < end and not complaints:
                pair = Pair(worker, Settings(rng), self.results / f"{worker}-{count}")
                pair.start(self.directory / f"file-{worker}")
                complaints += [complaint for complaint in [pair.run(rng)] if complaint]
                count += 1
            return count, complaints

        with concurrent.futures.ThreadPoolExecutor(PAIRS_AT_A_TIME) as pool:
            outcomes = list(pool.map(run_pairs, range(PAIRS_AT_A_TIME)))
        print(f"{sum(count for count, _ in outcomes)} pairs with seed {SEED}")
        self.assertEqual([complaint for _, complaints in outcomes for complaint in complaints], [])

    def test_bytes_that_another_program_changes_are_found(self):
        """The planted error: the suite finds wrong data."""
        rng, file = random.Random(SEED), self.directory / "file"
        pair = Pair(15, Settings(rng), self.results / "planted")
        pair.start(file)
        time.sleep(1)
        with open(file, "r+b") as changed:
            for at in range(0, pair.settings.mib * MIB, 16 * PAGE):
                changed.seek(at)
                byte = changed.read(1)[0]
                changed.seek(at)
                changed.write(bytes([byte ^ 0xff]))
        complaint = pair.run(rng) or "nothing"
        self.assertRegex(complaint, "is [0-9a-f]{2} instead of [0-9a-f]{2}|have changed|found another value")


if __name__ == "__main__":
    unittest.main()
