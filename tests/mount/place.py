"""An export, its mount, and the directory that it exports, for the tests of `terrace mount`."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TERRACE = ROOT / "build/bin/terrace"
START_S = 20
PORT = 7447


def addresses():
    """Loopback addresses that no concurrent run uses."""
    pid = os.getpid()
    return (f"127.{64 + (pid >> 8) % 16}.{pid % 256}.{number}" for number in range(1, 255))


ADDRESSES = addresses()


def wait_until(what, condition, seconds=START_S):
    """Waits for a condition, and says what it waited for if it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds} s")
        time.sleep(0.02)


def is_mounted(path):
    """Whether a FUSE file system is mounted there. `os.path.ismount` would ask a server that may be gone."""
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        return any(line.split()[1] == str(path) and line.split()[2].startswith("fuse") for line in mounts)


class Export:
    """`terrace export`, which can be killed and started again."""

    def __init__(self, directory, address, options=()):
        self.command = [TERRACE, "export", str(directory), "--listen", f"{address}:{PORT}", *options]
        self.process = None

    def start(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        if not self.process.stdout.readline():
            raise RuntimeError(f"the export ended with status {self.process.wait()}")

    def stop(self, number=signal.SIGTERM):
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
            self.process.wait()
            self.process.stdout.close()
            self.process = None


class Mount:
    """A process that mounts."""

    def __init__(self, command, path, **popen):
        self.command, self.path, self.popen = [str(part) for part in command], path, popen
        self.process = None

    def start(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, **self.popen)
        wait_until("the mount", lambda: is_mounted(self.path) or self.process.poll() is not None)
        if self.process.poll() is not None:
            raise RuntimeError(f"the mount ended with status {self.process.returncode}: {self.command}")

    def stop(self, number=signal.SIGTERM):
        """Returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=START_S)


class Place:
    """A directory on the server and the path at which it is mounted."""

    def __init__(self, directory, path, export, mount):
        self.directory, self.path, self.export, self.mount = directory, path, export, mount

    @contextlib.contextmanager
    def restarts(self, every_s, down_s=0.3):
        """Kills the server every so many seconds, and starts it again. Yields a list whose length is the number of kills."""
        kills, is_over = [], threading.Event()

        def run():
            while not is_over.wait(every_s):
                self.export.stop(signal.SIGKILL)
                time.sleep(down_s)
                self.export.start()
                kills.append(time.monotonic())

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield kills
        finally:
            is_over.set()
            thread.join()


@contextlib.contextmanager
def temporary():
    """A temporary directory that all users can enter."""
    base = pathlib.Path(tempfile.mkdtemp(prefix="terrace-mount-"))
    try:
        os.chmod(base, 0o755)
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


@contextlib.contextmanager
def mounted(*, others=False, loopback=None, options=(), export_options=(), **popen):
    """An export of an empty directory, mounted. `loopback` is the program that mounts the directory without an export."""
    with temporary() as base:
        directory, path = base / "exported", base / "mounted"
        for made in (directory, path):
            made.mkdir()
        server, client = next(ADDRESSES), next(ADDRESSES)
        export = Export(directory, server, export_options)
        if loopback:
            mount = Mount([loopback, directory, path, *(["others"] if others else [])], path, **popen)
        else:
            flags = [*(["--allow-other"] if others else []), *options]
            mount = Mount([TERRACE, "mount", f"{server}:/", path, "--addr", client, *flags], path, **popen)
        try:
            if not loopback:
                export.start()
            mount.start()
            yield Place(directory, path, export, mount)
        finally:
            if mount.process is not None and mount.process.poll() is None:
                mount.stop()
            if is_mounted(path):
                subprocess.run(["umount", "--lazy", path], check=False)
            export.stop()
