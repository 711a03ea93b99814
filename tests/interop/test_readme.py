"""README's commands, each run as it stands there, or with the reason why another test runs it. `make conformance` runs this."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest
from harness import procs

# The lines' programs listen at the same ports.
pytestmark = pytest.mark.xdist_group("readme")

LIMIT_S = 60
ROOT = procs.ROOT

# Lines that are not run here: where each is run, or why nothing runs it.
ELSEWHERE = {
    "make demo": "a step of .ci/run",
    "make test": "a step of .ci/run",
    "apt-get install ./build/packages": "tests/packages/test_roots.py, test_packages.py",
    "tar -xf build/packages": "tests/packages/test_packages.py",
    "terrace-0.1.0-x86_64/bin/terrace": "tests/packages/test_packages.py",
    "python3 -m venv": "tests/packages/test_wheel.py",
    "environment/bin/": "tests/packages/test_wheel.py",
    "ssh-keygen": "tests/packages/test_sums.py",
    "install -D": "changes /etc; crates/cli/tests/documents.rs and tests/packages check what the unit runs",
    "systemctl": "needs systemd",
    "cargo run --release": "compiles for minutes; tests/interop/kernel/test_served.py and tests/python have clients of `terrace serve`",
}
# Lines that need another end first: the end, and a text by which the line or that end shows success.
PAIRS = {
    "terrace run --pcap run.pcap -- ib_send_bw": ("terrace run -- ib_send_bw -n 5", "BW average"),
    "terrace run --fault-plan lossy.toml -- ibv_rc_pingpong": ("terrace run -- ibv_rc_pingpong -g 0 -c", "1000 iters"),
    "build/bin/terrace run --addr 127.0.0.1 -- ib_write_bw 127.0.0.1": ("build/bin/terrace run --addr 127.0.0.1 -- ib_write_bw", "BW average"),
}
# Lines that run until they are ended, and what they print by then.
ENDLESS = {
    "terrace run --fault-plan examples/faults.toml": "",
    "terrace stat --watch": "tx_packets",
    "build/bin/terrace serve": "",
}
# Lines that a test of another line runs.
STARTED_BY_OTHERS = ("build/bin/terrace run --addr 127.0.0.1 -- ib_write_bw",)


def lines():
    """The commands of README's blocks of shell, without comments."""
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        for line in block.splitlines():
            line = re.sub(r"\s+#.*", "", line)
            if line and line not in STARTED_BY_OTHERS:
                yield line


def value_of(table, line):
    return next((value for start, value in table.items() if line.startswith(start)), None)


class Shell:
    """A folder with the names that README's commands have, in which bash runs them. Their processes end with it."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        for name in ("build", "examples", "bench"):
            (folder / name).symlink_to(ROOT / name)
        self.environment = {**os.environ, "PATH": f"{procs.terrace_binary().parent}:{os.environ['PATH']}", "TERRACE_ADDR": "127.0.0.1"}

    def start(self, line):
        output = open(self.folder / f"output-{len(self.started)}", "w+")
        line = line.replace("/var/tmp/", f"{self.folder}/")
        command = ["timeout", "--kill-after=5", str(LIMIT_S), "bash", "-c", line]
        process = subprocess.Popen(command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, **procs.OWN_GROUP)
        self.started.append((process, output))
        return process, pathlib.Path(output.name)

    def close(self):
        for process, output in self.started:
            # What a line has left in the background is in its process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)
            output.close()


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("readme"))
    yield shell
    shell.close()


def run_to_its_end(shell, line):
    process, output = shell.start(line)
    status = process.wait(LIMIT_S + 20)
    return status, output.read_text()


@pytest.mark.parametrize("line", lines())
def test_line(line, shell):
    reason = value_of(ELSEWHERE, line)
    if reason:
        pytest.skip(reason)
    pair = value_of(PAIRS, line)
    if pair:
        check_pair(shell, line, *pair)
    elif value_of(ENDLESS, line) is not None:
        check_endless(shell, line, value_of(ENDLESS, line))
    else:
        status, printed = run_to_its_end(shell, line)
        assert status == 0, printed


def check_pair(shell, line, first, needle):
    other, output = shell.start(first)
    # The other end listens after a while.
    for _ in range(50):
        status, printed = run_to_its_end(shell, line)
        if status == 0:
            break
        time.sleep(0.1)
    assert status == 0 and needle in printed, printed
    assert other.wait(LIMIT_S) == 0, output.read_text()


def check_endless(shell, line, needle):
    # `terrace stat` shows a process that has a device.
    shown = shell.start("terrace run -- ib_write_bw")[0] if "stat" in line else None
    time.sleep(1.0)
    process, output = shell.start(line)
    time.sleep(1.5)
    if line.endswith("&"):
        assert process.wait(5) == 0, output.read_text()
    else:
        assert process.poll() is None, output.read_text()
    assert needle in output.read_text()
    if shown is not None:
        os.killpg(shown.pid, signal.SIGTERM)
