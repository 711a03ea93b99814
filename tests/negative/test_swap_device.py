"""`terrace swap-device` on a memory node: what it stores there, a node that is lost or full, its locked memory, its end, and
command lines that are refused. `crates/nbd/tests` has the protocol, `tests/interop/swap` a kernel that swaps."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.request

from support import TERRACE, USAGE, assert_refused, fill, fresh_address

REFUSED = 1
PAGE = 4096
EIO, ENOSPC = 5, 28
READ, WRITE, TRIM = 0, 1, 4
PORT = 7474
LIMIT_S = 60


class Disk:
    """A client of a network block device, which has one request in flight."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(LIMIT_S)
        self.socket.connect(str(path))
        self.socket.sendall(struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 1, 0))
        greeting = self.receive(28)
        self.size, = struct.unpack_from(">Q", greeting, 18)

    def close(self):
        self.socket.close()

    def receive(self, length):
        data = b""
        while len(data) < length:
            piece = self.socket.recv(length - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def request(self, command, offset, length, data=b""):
        """The error and the data of a request."""
        self.socket.sendall(struct.pack(">IHHQQI", 0x25609513, 0, command, 1, offset, length) + data)
        _, error, _ = struct.unpack(">IIQ", self.receive(16))
        return error, self.receive(length) if command == READ and error == 0 else b""


class SwapDevice(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.directory.chmod(0o777)
        self.socket = self.directory / "swap"

    def start(self, *arguments, wrapper=()):
        """Starts a command that runs until it is ended. Returns its process after its first line."""
        process = subprocess.Popen([*wrapper, TERRACE, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.kill, process)
        self.assertTrue(process.stdout.readline(), "no first line")
        return process

    @staticmethod
    def kill(process):
        process.kill()
        with contextlib.suppress(ValueError):
            process.communicate()

    def node(self, memory="16M"):
        listen = f"{fresh_address()}:{PORT}"
        return self.start("memory-node", "--memory", memory, "--listen", listen), listen

    def device(self, *nodes, options=()):
        return self.start("swap-device", "--memory-node", ",".join(nodes), "--size", "64M", "--socket", self.socket, *options)

    def status(self, listen):
        argv = [TERRACE, "memory-node", "--status", listen, "--json"]
        return json.loads(subprocess.run(argv, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout)

    def end(self, process):
        """SIGTERM ends the command with status 0. Returns its standard error."""
        process.terminate()
        _, complaints = process.communicate(timeout=LIMIT_S)
        self.assertEqual(process.returncode, 0, complaints)
        return complaints


class Pages(SwapDevice):
    def test_pages_are_on_the_node_until_they_are_discarded_or_the_device_ends(self):
        node, listen = self.node()
        device = self.device(listen)
        disk = self.enterContext(contextlib.closing(Disk(self.socket)))
        self.assertEqual(disk.size, 64 << 20)
        content = os.urandom(10 * PAGE)
        self.assertEqual(disk.request(WRITE, 5 * PAGE, len(content), content), (0, b""))
        self.assertEqual(disk.request(READ, 5 * PAGE - 100, 300), (0, bytes(100) + content[:200]))
        client, = self.status(listen)["clients"]
        self.assertEqual((client["pages"], client["name"]), (10, f"swap device {self.socket}"))
        self.assertEqual(disk.request(TRIM, 5 * PAGE, 4 * PAGE), (0, b""))
        self.assertEqual(self.status(listen)["clients"][0]["pages"], 6)
        device.send_signal(signal.SIGUSR1)
        said = device.stdout.readline() + device.stdout.readline()
        self.assertRegex(said, r"swap device: 1 connections, 3 requests \(0 failed\), .* 6 in use\n  \S+: 6 pages\n")
        self.assertEqual(self.end(device), "")
        self.assertFalse(self.socket.exists())
        deadline = time.monotonic() + LIMIT_S
        while self.status(listen)["clients"]:
            self.assertLess(time.monotonic(), deadline, "the node keeps pages of a device that has ended")
            time.sleep(0.05)
        self.end(node)

    def test_a_long_path(self):
        _, listen = self.node()
        self.socket = self.directory / ("s" * 60)
        self.assertEqual(self.end(self.device(listen)), "")

    def test_a_lost_node_is_eio_and_one_line(self):
        node, listen = self.node()
        device = self.device(listen)
        disk = self.enterContext(contextlib.closing(Disk(self.socket)))
        self.assertEqual(disk.request(WRITE, 0, PAGE, b"a" * PAGE)[0], 0)
        node.kill()
        for _ in range(3):
            self.assertEqual(disk.request(READ, 0, PAGE)[0], EIO)
        complaints = self.end(device)
        self.assertEqual(len(re.findall("requests fail with EIO", complaints)), 1, complaints)

    def test_a_mirror_survives_a_node(self):
        (first, first_listen), (_, second_listen) = self.node(), self.node()
        device = self.device(first_listen, second_listen, options=("--mirror", "2"))
        disk = self.enterContext(contextlib.closing(Disk(self.socket)))
        content = os.urandom(64 * PAGE)
        self.assertEqual(disk.request(WRITE, 0, len(content), content)[0], 0)
        first.kill()
        self.assertEqual(disk.request(READ, 0, len(content)), (0, content))
        self.assertEqual(disk.request(WRITE, 100, 5, b"hello")[0], 0)
        self.assertEqual(disk.request(READ, 100, 5), (0, b"hello"))
        self.assertNotIn("EIO", self.end(device))

    def nodes_of(self, device):
        """What SIGUSR1 prints of each of two nodes."""
        device.send_signal(signal.SIGUSR1)
        return [device.stdout.readline() for _ in range(3)][1:]

    def test_a_stopped_node_that_goes_on_is_used_again(self):
        (first, first_listen), (second, second_listen) = self.node(), self.node()
        device = self.device(first_listen, second_listen, options=("--mirror", "2"))
        disk = self.enterContext(contextlib.closing(Disk(self.socket)))
        content = os.urandom(64 * PAGE)
        self.assertEqual(disk.request(WRITE, 0, len(content), content)[0], 0)
        first.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)
        self.assertEqual(disk.request(WRITE, 100, 5, content[100:105])[0], 0)
        self.assertIn("; lost: ", self.nodes_of(device)[0])
        first.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + LIMIT_S
        # A loaded machine may lose a node more than once.
        joined = r"64 pages, 0 missing; lost \d+ times, joined again [1-9]\d* times, \d+ pages copied\n"
        while not re.search(joined, self.nodes_of(device)[0]):
            self.assertLess(time.monotonic(), deadline, self.nodes_of(device))
            time.sleep(0.05)
        # Copies are counted before the line is written. A device that does not write it is ended.
        watchdog = threading.Timer(LIMIT_S, device.kill)
        watchdog.start()
        self.addCleanup(watchdog.cancel)
        lines = iter(device.stderr.readline, "")
        self.assertTrue(any("all pages that are left have two copies again" in line for line in lines), "no line in the log")
        watchdog.cancel()
        second.kill()
        self.assertEqual(disk.request(READ, 0, len(content)), (0, content))
        self.end(device)

    def test_stat_and_metrics_show_its_counters_and_nodes(self):
        (_, listen), metrics = self.node(), f"{fresh_address()}:{PORT}"
        device = self.device(listen, options=("--metrics", metrics))
        disk = self.enterContext(contextlib.closing(Disk(self.socket)))
        self.assertEqual(disk.request(WRITE, 0, 3 * PAGE, b"a" * 3 * PAGE)[0], 0)
        stat = subprocess.run([TERRACE, "stat", str(device.pid), "--json"], check=True, capture_output=True, text=True, timeout=LIMIT_S)
        found = json.loads(stat.stdout)["devices"][0]
        self.assertEqual((found["swap_device"]["stored_pages"], found["swap_device"]["failed_requests"]), (3, 0))
        self.assertEqual([(node["address"], node["pages"], node["lost"]) for node in found["memory_nodes"]], [(listen, 3, None)])
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=LIMIT_S) as answer:
            lines = answer.read().decode().splitlines()
        self.assertIn("terrace_swap_stored_pages_total 3", lines)
        self.assertIn(f'terrace_swap_node_pages{{node="{listen}"}} 3', lines)

    def test_a_full_node_is_enospc(self):
        _, listen = self.node("1M")
        device = self.device(listen)
        disk = self.enterContext(contextlib.closing(Disk(self.socket)))
        self.assertEqual(disk.request(WRITE, 0, 200 * PAGE, b"a" * 200 * PAGE)[0], 0)
        self.assertEqual(disk.request(WRITE, 200 * PAGE, 100 * PAGE, b"b" * 100 * PAGE)[0], ENOSPC)
        # What is stored can be stored anew.
        self.assertEqual(disk.request(WRITE, 0, PAGE, b"c" * PAGE)[0], 0)
        self.assertEqual(disk.request(READ, PAGE - 1, 2), (0, b"ca"))
        self.assertEqual(self.end(device).count("requests fail with ENOSPC"), 1)

    def test_all_memory_is_locked(self):
        _, listen = self.node()
        device = self.device(listen)
        fields = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{device.pid}/status").read_text().splitlines())
        resident, locked = (int(fields[name].split()[0]) for name in ("VmRSS", "VmLck"))
        self.assertGreater(locked, 32 << 10)
        # The library, the program, stacks and rings; not the address space that is reserved for more.
        self.assertLess(resident, 256 << 10)
        self.assertEqual(fields["VmSwap"].split()[0], "0")


class Refusals(SwapDevice):
    def refused(self, said, *arguments, status=REFUSED, wrapper=()):
        argv = [*wrapper, TERRACE, "swap-device", "--socket", str(self.socket), *arguments]
        outcome = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)
        assert_refused(self, outcome, status, said)
        self.assertFalse(self.socket.is_socket())

    def test_wrong_command_lines(self):
        node = f"{fresh_address()}:{PORT}"
        self.refused("needs as many memory nodes", "--memory-node", node, "--mirror", "2", "--size", "1M", status=USAGE)
        self.refused("at least one page", "--memory-node", node, "--size", "4095", status=USAGE)
        self.refused("HOST:PORT", "--memory-node", "nowhere", "--size", "1M", status=USAGE)
        self.refused("3", "--memory-node", node, "--mirror", "3", "--size", "1M", status=USAGE)

    def test_no_memory_node(self):
        self.refused("no memory node answers", "--memory-node", f"{fresh_address()}:{PORT}", "--size", "1M")

    def test_a_path_that_is_no_socket(self):
        _, listen = self.node()
        self.socket.write_text("mine")
        self.refused("cannot listen at", "--memory-node", listen, "--size", "1M")
        self.assertEqual(self.socket.read_text(), "mine")

    def test_a_node_with_more_memory_than_the_machine(self):
        argv = [TERRACE, "memory-node", "--memory", "500G", "--listen", "127.0.0.1:0"]
        outcome = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)
        assert_refused(self, outcome, REFUSED, "--memory: a budget of 536870912000 bytes is more than the")

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("setpriv"), "needs root and setpriv")
    def test_memory_that_may_not_be_locked(self):
        _, listen = self.node()
        wrapper = ("prlimit", "--memlock=8388608:8388608", "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")
        before = self.directory.stat().st_mtime_ns
        self.refused("now 8192 KiB", "--memory-node", listen, "--size", "1M", wrapper=wrapper)
        self.assertEqual(self.directory.stat().st_mtime_ns, before, "there was a socket, to which a kernel may have swapped")

    def test_a_standard_output_that_is_full(self):
        _, listen = self.node()
        device = self.device(listen)
        fill(f"/proc/self/fd/{device.stdout.fileno()}")
        device.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        device.terminate()
        self.assertEqual(device.wait(timeout=20), 0)

    def test_a_standard_output_that_is_full_from_the_beginning(self):
        _, listen = self.node()
        reader, writer = os.pipe()
        self.addCleanup(os.close, reader)
        fill(f"/proc/self/fd/{writer}")
        argv = [TERRACE, "swap-device", "--memory-node", listen, "--size", "64M", "--socket", self.socket]
        device = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        self.addCleanup(self.kill, device)
        deadline = time.monotonic() + 20
        while not self.socket.exists():
            self.assertLess(time.monotonic(), deadline, "no socket")
            time.sleep(0.05)
        with contextlib.closing(Disk(self.socket)) as disk:
            self.assertEqual(disk.size, 64 << 20)
        device.terminate()
        self.assertEqual(device.wait(timeout=20), 0)

    def test_a_terminal_that_has_room_for_part_of_a_text(self):
        _, listen = self.node()
        reader, terminal = os.openpty()
        self.addCleanup(os.close, reader)
        argv = [TERRACE, "swap-device", "--memory-node", listen, "--size", "64M", "--socket", self.socket]
        device = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=terminal, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.kill, device)
        self.assertTrue(os.read(reader, 4096), "no first line")
        fill(os.ttyname(terminal))
        os.close(terminal)
        os.read(reader, 4096)
        for _ in range(200):
            device.send_signal(signal.SIGUSR1)
            time.sleep(0.01)
        device.terminate()
        self.assertEqual(device.wait(timeout=20), 0)

    def test_metrics_that_cannot_be_served(self):
        _, listen = self.node()
        before = self.directory.stat().st_mtime_ns
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            self.refused("metrics", "--memory-node", listen, "--size", "1M", "--metrics", address)
        self.assertEqual(self.directory.stat().st_mtime_ns, before, "there was a socket, to which a kernel may have swapped")


if __name__ == "__main__":
    unittest.main()
