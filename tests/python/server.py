"""A memory node for tests: `terrace serve` with one region."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import tempfile

import terrace

COMMAND = os.environ.get("TERRACE") or str(pathlib.Path(__file__).resolve().parents[2] / "build/bin/terrace")
MIB = 1 << 20
TIMEOUT_S = 30


class Alarm(Exception):
    """What the handler of a test's signal raises."""


def raise_alarms(test):
    """Has SIGALRM raise `Alarm` until the end of a test."""
    def ring(*_):
        raise Alarm

    test.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, ring))


class Server:
    """Serves the region `table` until the end of a `with` block."""

    def __init__(self, size_mib=8, dram_mib=4):
        self.options = ("--dram", f"{dram_mib}M")
        self.size = f"{size_mib}M"

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="terrace-python-")
        self.path = pathlib.Path(self.folder.name, "table.bin")
        command = (COMMAND, "serve", "--listen", "127.0.0.1", "--region", f"table={self.path}:{self.size}", *self.options)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        line = self.process.stdout.readline()
        port = re.search(r"UDP port (\d+)", line)
        if not port:
            self.__exit__()
            raise RuntimeError(f"the server says: {line}")
        # Other processes of this machine may have the first instances.
        self.instance = int(port[1]) - 4791
        return self

    def connect(self, **keywords):
        return terrace.connect("127.0.0.1", instance=self.instance, **keywords)

    def kill(self):
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def pause(self):
        """Stops the process; returns when all of its threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def stop(self):
        """Ends the server, which writes the region to its file."""
        self.process.terminate()
        return self.process.wait(TIMEOUT_S)

    def __exit__(self, *_exception):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(TIMEOUT_S)
        self.process.stdout.close()
        # A server that is killed leaves its pages in memory, in the file that this one names.
        with contextlib.suppress(FileNotFoundError):
            lock_file = self.path.with_name(f".{self.path.name}.terrace-pages")
            os.unlink(lock_file.read_text().splitlines()[0])
        self.folder.cleanup()


class ExportServer:
    """Exports a new directory until the end of a `with` block: `terrace export`. Clients of this host that are root stay root."""

    def __init__(self, rules="root = true\n"):
        self.rules = rules

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="terrace-python-")
        self.path = pathlib.Path(self.folder.name, "exported")
        self.path.mkdir()
        # An ordinary user can reach the files.
        for path in (self.folder.name, self.path):
            os.chmod(path, 0o755)
        rules = pathlib.Path(self.folder.name, "rules.toml")
        rules.write_text(self.rules)
        self.command = [COMMAND, "export", str(self.path), "--rules", str(rules), "--listen"]
        self.port = 0
        self.start()
        return self

    def start(self):
        command = (*self.command, f"127.0.0.1:{self.port}")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        line = self.process.stdout.readline()
        port = re.search(r" at 127\.0\.0\.1:(\d+) ", line)
        if not port:
            self.__exit__()
            raise RuntimeError(f"the server says: {line}")
        self.port = int(port[1])

    def connect(self, **keywords):
        return terrace.connect_export("127.0.0.1", port=self.port, **keywords)

    def end(self):
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        self.process.stdout.close()

    def pause(self):
        """Stops the process; returns when all of its threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def __exit__(self, *_exception):
        self.end()
        self.folder.cleanup()
