#!/usr/bin/env python3
"""Runs Terrace against the Linux kernel's Soft-RoCE (rdma_rxe), which runs in a guest under QEMU.

    run.py                 everything
    run.py atomics Faults  tests whose name has one of the words in it

All of it happens in a network namespace of its own. Output, the guest's console and captures of what failed are kept in
results/interop/RUN/. Exit status 0 when nothing failed, and when this machine cannot do it, which a line says.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "scripts"), str(HERE.parents[1] / "badinput"), str(HERE.parent)]

import guest as machine  # noqa: E402
import image  # noqa: E402
import peers  # noqa: E402
from harness import procs  # noqa: E402

TUN = pathlib.Path("/dev/net/tun")
# Says that this process is the one within the namespace.
INSIDE = "TERRACE_INTEROP_INSIDE"


def main():
    if INSIDE in os.environ:
        return run(sys.argv[1:])
    reason = why_not()
    if reason:
        print(f"interop: skipped: {reason}")
        return 0
    prepare()
    os.execvpe("unshare", [*unshare(), sys.executable, __file__, *sys.argv[1:]], {**os.environ, INSIDE: "1"})


def unshare():
    """The start of a command in namespaces of its own: no interface of this machine is touched."""
    return ["unshare", "--net", "--mount", *(["--map-root-user"] if os.geteuid() != 0 else [])]


def why_not():
    """Why this machine cannot do it, or None."""
    if not TUN.exists():
        return f"{TUN} is missing, so a guest cannot have a network (modprobe tun; in a container: --device {TUN})"
    setup = subprocess.run([procs.ROOT / "scripts/setup.sh", "interop"], stdout=sys.stdout, stderr=subprocess.PIPE, text=True)
    if setup.returncode != 0:
        if shutil.which("qemu-system-x86_64") is None:
            return f"QEMU cannot be had here: {setup.stderr.strip()}"
        sys.exit(setup.stderr.strip())
    namespace = subprocess.run([*unshare(), "mount", "-t", "sysfs", "sysfs", "/sys"], capture_output=True, text=True)
    return None if namespace.returncode == 0 else f"no network namespace: {namespace.stderr.strip()}"


def prepare():
    if not procs.terrace_binary().exists():
        sys.exit(f"interop: {procs.terrace_binary()} is missing: run `make build`")
    subprocess.run(["make", "--no-print-directory", "interop-programs"], cwd=procs.ROOT, check=True)


def run(patterns):
    procs.end_cleanly_when_asked()
    run_dir = procs.new_run_dir("interop")
    loader = unittest.TestLoader()
    loader.testNamePatterns = [f"*{pattern}*" for pattern in patterns] or None
    suite = loader.discover(str(HERE), pattern="test_*.py")
    machine.lay_network()
    started = time.monotonic()
    try:
        with contextlib.closing(machine.Guest(run_dir)) as peers.guest:
            print(f"the guest was up in {time.monotonic() - started:.1f} s; logs in {run_dir}", flush=True)
            result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=Result).run(suite)
    except (machine.GuestError, image.Incomplete) as error:
        sys.exit(f"interop: {error}")
    return 0 if result.wasSuccessful() and result.testsRun > 0 else 1


class Result(unittest.TextTestResult):
    """Captures what goes over the wire during each test, and keeps the capture if it fails."""

    def startTest(self, test):
        self._capture = peers.guest.log_dir / f"{test.id()}.pcap"
        self._failures_before = self._failure_count()
        self._started = time.monotonic()
        peers.guest.begin_capture(self._capture)
        super().startTest(test)

    def stopTest(self, test):
        super().stopTest(test)
        peers.guest.end_capture()
        if self._failure_count() == self._failures_before:
            self._capture.unlink(missing_ok=True)

    def addSuccess(self, test):
        self.stream.write(f"({time.monotonic() - self._started:.1f} s) ")
        super().addSuccess(test)

    def _failure_count(self):
        return len(self.failures) + len(self.errors)

    def _exc_info_to_string(self, err, test):
        kept = f"packets: {self._capture}\nthe guest's console: {peers.guest.console_path}\n"
        return super()._exc_info_to_string(err, test) + kept


if __name__ == "__main__":
    sys.exit(main())
