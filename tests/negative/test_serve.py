"""`terrace serve`: an error is one line with a remedy. Clients that send invalid requests, or vanish in the middle of a
request, affect only themselves. `crates/cli/tests/storage_failures.rs` tests disks that fail, fill up and shrink."""

import contextlib
import os
import pathlib
import random
import shutil
import struct
import subprocess
import tempfile
import time
import unittest

import control
import roce
from control import (ACCESS_DENIED, DONE, FIND, FOUND, INVALID, MAGIC, NO_SUCH_REGION, OK, OPEN, OPENED, OUT_OF_RANGE,
                     PAIR, PAIRED, READ, WRITE, NoAnswer, ControlClient, message)
from support import TERRACE, USAGE, assert_refused, fresh_address

from harness import cgroup  # noqa: E402  (support has set the path)
from harness.endpoint import stat  # noqa: E402

MIB = 1 << 20
REFUSED = 1


class Serving(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        # Servers that are killed leave their frames.
        self.frames = self.enterContext(tempfile.TemporaryDirectory(dir="/dev/shm"))
        self.directory.chmod(0o755)
        os.chmod(self.frames, 0o1777)
        self.command = TERRACE

    def path(self, name, size=None):
        path = self.directory / name
        if size is not None:
            path.write_bytes(b"")
            os.truncate(path, size)
        return path

    def argv(self, *arguments, wrapper=(), address=None):
        return [*wrapper, self.command, "serve", "--listen", address or fresh_address(), "--frames", self.frames, *map(str, arguments)]

    def node(self, *arguments):
        """Starts a node. Returns its process and address."""
        argv = self.argv(*arguments)
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.end, process)
        line = process.stdout.readline()
        self.assertTrue(line.startswith("serving at "), line)
        return process, argv[argv.index("--listen") + 1]

    def end(self, process):
        """The node runs until SIGTERM, ends with status 0, and has printed no error."""
        self.assertIsNone(process.poll(), "the node has ended")
        process.terminate()
        _, complaints = process.communicate(timeout=20)
        self.assertEqual((process.returncode, complaints), (0, ""))


class Errors(Serving):
    def refused(self, said, *arguments, status=REFUSED, **options):
        argv = self.argv(*arguments, **options)
        outcome = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
        assert_refused(self, outcome, status, said)

    def test_missing_files(self):
        self.refused("does not exist; give a size", "--region", f"r={self.path('none')}", "--dram", "1M")
        self.assertFalse(self.path("none").exists())
        self.refused("No such file or directory", "--region", "r=/no/such/directory/r:1M", "--dram", "1M")

    def test_unsuitable_files(self):
        self.refused("cannot open", "--region", f"r={self.directory}:1M", "--dram", "1M")
        self.refused("neither a regular file nor a block device", "--region", "r=/dev/null:1M", "--dram", "1M")
        pipe = self.path("pipe")
        os.mkfifo(pipe)
        self.refused("neither a regular file nor a block device", "--region", f"r={pipe}:1M", "--dram", "1M")

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("setpriv"), "needs root and setpriv")
    def test_read_only_files(self):
        """Root may write any file, so the command runs as another user."""
        self.command = shutil.copy(TERRACE, self.directory / "terrace")
        path = self.path("readonly", MIB)
        path.chmod(0o444)
        nobody = ("setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all", "--")
        self.refused("for reading and writing: Permission denied", "--region", f"r={path}", "--dram", "1M", wrapper=nobody)
        self.refused("Permission denied", "--region", f"r={self.path('new')}:1M", "--dram", "1M", wrapper=nobody)

    def test_invalid_sizes(self):
        for size, said in (("4097", "multiple of 4096"), ("4194304T", "cannot have")):
            with self.subTest(size):
                self.refused(said, "--region", f"r={self.path('r')}:{size}", "--dram", "1M")
        self.refused("at least one page", "--region", f"r={self.path('empty', 0)}", "--dram", "1M")
        self.refused("multiple of 4096", "--region", f"r={self.path('odd', 5000)}", "--dram", "1M")
        for size in ("0", "1Q", "1.5G"):
            with self.subTest(size):
                self.refused("size", "--region", f"r={self.path('x')}:{size}", "--dram", "1M", status=USAGE)

    def test_names(self):
        region = f"{self.path('r', MIB)}"
        self.refused("cannot be named \"a\"", "--region", f"a={region}", "--region", f"a={region}", "--dram", "1M", status=USAGE)
        self.refused("cannot be named", "--region", f"{'x' * 256}={region}", "--dram", "1M", status=USAGE)
        for nonsense in ("", "r", "=x", "r="):
            self.refused("--region", "--region", nonsense, "--dram", "1M", status=USAGE)

    def test_two_servers_of_one_file(self):
        path = self.path("r", 8 * MIB)
        process, _ = self.node("--region", f"r={path}", "--dram", "2M")
        self.refused("another server has it locked", "--region", f"r={path}", "--dram", "2M")
        self.assertIsNone(process.poll())

    def test_one_file_twice(self):
        path = self.path("r", 8 * MIB)
        self.refused("this process has it locked already: name each file once", "--region", f"a={path}", "--region", f"b={path}",
                     "--dram", "2M")

    def test_invalid_budgets(self):
        region = f"r={self.path('r', 8 * MIB)}"
        self.refused("of memory that this machine has", "--region", region, "--dram", "100T")
        self.refused("make the budget larger", "--region", region, "--dram", "4M", "--mode", "pin")
        for nonsense in ("much", "-1", ""):
            self.refused("--dram", "--region", region, f"--dram={nonsense}", status=USAGE)

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("setpriv"), "needs root and setpriv")
    def test_a_budget_above_the_memlock_limit(self):
        wrapper = ("prlimit", "--memlock=8388608:8388608", "setpriv", "--bounding-set=-ipc_lock,-sys_resource",
                   "--inh-caps=-ipc_lock,-sys_resource")
        self.refused("ulimit -l", "--region", f"r={self.path('r', 8 * MIB)}", "--dram", "64M", "--mode", "pin", wrapper=wrapper)

    def test_a_budget_above_the_control_groups_limit(self):
        try:
            group = self.enterContext(cgroup.memory_group(f"terrace-negative-serve-{os.getpid()}", 64 * MIB))
        except cgroup.Unavailable as unavailable:
            self.skipTest(str(unavailable))
        self.refused("control group", "--region", f"r={self.path('r', 8 * MIB)}", "--dram", "128M", wrapper=group.argv([]))

    def test_foreign_addresses(self):
        region = ("--region", f"r={self.path('r', MIB)}", "--dram", "1M")
        self.refused("not an address of this machine", *region, address="192.0.2.199")
        self.refused("192.0.2.199:1", *region, "--metrics", "192.0.2.199:1")


class HostileClients(Serving):
    """A node, hostile clients, and an honest client that sends a request after each attack."""

    def setUp(self):
        super().setUp()
        self.process, self.address = self.node("--region", f"r={self.path('r', 8 * MIB)}", "--dram", "2M")
        # A client uses two queue pair numbers: its control queue pair, and the next one for the queue pair that it may
        # request.
        self.qpns = iter(range(0x0400, 0x8000, 2))
        self.witness = self.client()
        self.region = self.witness.find("r")

    def peer(self):
        peer = roce.Peer(fresh_address())
        self.addCleanup(peer.close)
        return peer

    def client(self):
        return ControlClient(self.peer(), self.address, next(self.qpns))

    def expect_node_serves(self):
        """The node still serves other clients."""
        self.assertIsNone(self.process.poll())
        self.assertEqual(self.witness.find("r"), self.region)

    def expect_end(self, attacker):
        """The node has ended this connection, and serves others."""
        with self.assertRaises(NoAnswer):
            attacker.request(FIND, b"r", timeout_s=0.2)
        self.expect_node_serves()

    def test_a_node_sends_to_its_clients_addresses_only(self):
        """The queue pair number in a client's message selects a port. No field of a message selects an address."""
        client = self.client()
        client.find("r")
        for qpn in (0x300, 0x7F_0300, 0xFF_FFFE):
            kind, _, _ = client.request(PAIR, struct.pack("<IIH", qpn, 0, control.MTU))
            self.assertEqual(kind, PAIRED)
        remotes = [pair["remote"] for pair in stat(self.process.pid)["queue_pairs"] if pair["remote"]]
        addresses = {remote.rsplit(":", 1)[0] for remote in remotes}
        self.assertEqual(addresses, {client.peer.address, self.witness.peer.address})
        self.assertEqual(sum(remote.startswith(f"{client.peer.address}:") for remote in remotes), 4)

    def test_malformed_messages_end_their_connection(self):
        rkey, va, length, region_id = self.region
        lies = {
            "nothing": b"",
            "a part of a header": message(FIND, b"r")[:9],
            "another version": message(FIND, b"r", version=1),
            "an unknown kind": message(99),
            "a status in a request": message(FIND, b"r", status=3),
            "an unknown status": message(DONE, status=999),
            "longer than its length field": message(FIND, b"r", length=16),
            "shorter than its length field": message(FIND, b"r", length=1 << 31),
            "an invalid name": message(FIND, b"\xff\xfe"),
            "an empty name": message(FIND),
            "too long a name": message(FIND, b"x" * 256),
            "a short body": message(OPEN, b"x" * 7),
            "a long body": message(OPEN, bytes(17)),
            "reserved bytes": message(OPEN, b"\1" * 16),
            "no bytes to read": message(READ, control.read(rkey, va, 0)),
            "an address that wraps": message(READ, control.read(rkey, (1 << 64) - 8, 16)),
            "a destination that wraps": message(READ, control.read(rkey, va, 16, ((1 << 64) - 8, 1))),
            "too many pages": message(READ, control.read(rkey, va, 16, page_count=1 << 31)),
            "pages without a bitmap": message(READ, control.read(rkey, va, 4096, page_count=1)),
            "pages beyond the region": message(READ, control.read(rkey, va, 4096, page_count=1, words=[2])),
            "less data than its length field": message(WRITE, control.write(rkey, va, b"abc", length=4)),
            "more data than its length field": message(WRITE, control.write(rkey, va, b"abc", length=2)),
            "a zero source": message(WRITE, struct.pack("<IIQIB3xQ", rkey, 4, va, 0, 9, 0)),
            "a switch that is neither on nor off": message(MAGIC, control.magic(1, 2, rkey, region_id, on=2)),
            "an invalid path MTU": message(PAIR, struct.pack("<IIH", 0x300, 0, 1000)),
        }
        peer = self.peer()
        for what, lie in lies.items():
            with self.subTest(what):
                attacker = ControlClient(peer, self.address, next(self.qpns))
                attacker.send_message(lie)
                self.expect_end(attacker)

    def test_requests_of_one_message_are_refused_one_by_one(self):
        rkey, va, length, region_id = self.region
        attacker = self.client()
        attacker.grant(rkey, region_id)

        def answers(*reads):
            """Status, first id and number of requests of each answer."""
            attacker.send_message(message(READ, b"".join(reads)))
            left, answers = len(reads), []
            while left > 0:
                kind, status, ident, body = attacker.answer()
                self.assertEqual(kind, DONE)
                count, = struct.unpack("<I", body)
                answers.append((status, ident, count))
                left -= count
            return answers

        beyond, unknown = control.read(rkey, va + length, 1), control.read(rkey ^ 1, va, 16)
        stale = control.read(rkey, va, 16, page_count=2, offset=4095, words=[1])
        self.assertEqual(answers(beyond, unknown, unknown, stale),
                         [(OUT_OF_RANGE, 7, 1), (ACCESS_DENIED, 8, 2), (INVALID, 10, 1)])
        # As many as fit into one packet.
        self.assertEqual(answers(*[beyond] * 24), [(OUT_OF_RANGE, 7, 24)])
        self.expect_node_serves()

    def test_random_bytes(self):
        noise = random.Random(3)
        attacker = self.client()
        for _ in range(60):
            if noise.random() < 0.5:
                data = noise.randbytes(noise.randrange(200))
            else:
                data = message(noise.randrange(1, 12), noise.randbytes(noise.randrange(64)))
            attacker.send_message(data)
            try:
                attacker.answer(0.05)
            except NoAnswer:
                attacker = ControlClient(attacker.peer, self.address, next(self.qpns))
        self.expect_node_serves()

    def test_unauthorized_requests_fail(self):
        rkey, va, length, region_id = self.region
        attacker = self.client()

        def refused(status, kind, body):
            self.assertEqual(attacker.request(kind, body)[:2], (DONE, status))

        # No queue pair of this client has been granted access to the region.
        refused(ACCESS_DENIED, OPEN, struct.pack("<I4xQ", rkey, region_id))
        refused(ACCESS_DENIED, READ, control.read(rkey, va, 16))
        refused(ACCESS_DENIED, WRITE, control.write(rkey, va, b"data"))
        for server_qpn in (0, 1, attacker.server_qpn, 0x123456):
            refused(ACCESS_DENIED, MAGIC, control.magic(attacker.qpn, server_qpn, rkey, region_id))
        refused(NO_SUCH_REGION, MAGIC, control.magic(attacker.qpn, 0, rkey ^ 1, region_id))
        refused(NO_SUCH_REGION, FIND, b"another")
        for kind, body in ((OPENED, bytes(48)), (DONE, struct.pack("<I", 1)), (PAIRED, struct.pack("<IIH", 1, 0, 1024))):
            refused(INVALID, kind, body)
        kind, _, body = attacker.request(PAIR, struct.pack("<IIH", 0x999, 0, 1024))
        self.assertEqual(kind, PAIRED)
        # A queue pair of this client, but a wrong number for the client's end.
        refused(ACCESS_DENIED, MAGIC, control.magic(0x998, struct.unpack_from("<I", body)[0], rkey, region_id))
        attacker.grant(rkey, region_id)
        for at, size in ((va + length, 1), (va + length - 8, 9), (va + length // 2, length), (1 << 62, 8)):
            refused(OUT_OF_RANGE, READ, control.read(rkey, at, size))
            refused(OUT_OF_RANGE, WRITE, control.write_from_memory(rkey, at, size, 0, 1))
        refused(INVALID, READ, control.read(rkey, va, 4096, page_count=2, offset=5, words=[1]))
        refused(NO_SUCH_REGION, OPEN, struct.pack("<I4xQ", rkey, region_id ^ 1))
        refused(ACCESS_DENIED, READ, control.read(rkey ^ 1, va, 8))
        refused(OK, WRITE, control.write(rkey, va + 5, b"data"))
        self.expect_node_serves()

    def test_a_destination_without_access_for_the_node(self):
        rkey, va, _, region_id = self.region
        attacker = self.client()
        attacker.grant(rkey, region_id)
        attacker.send_message(message(READ, control.read(rkey, va, 16)))
        packet = attacker.receive_packet()
        self.assertEqual(packet.opcode, roce.WRITE_ONLY_IMM, "the answer is sent with the data")
        attacker.acknowledge(packet.psn, roce.NAK_ACCESS)
        self.expect_end(attacker)

    def test_clients_that_vanish_during_requests(self):
        """Clients vanish after WRITE requests whose data they never serve, or READ requests whose answers they never
        acknowledge."""
        rkey, va, _, region_id = self.region
        for number in range(6):
            attacker = self.client()
            attacker.grant(rkey, region_id)
            for place in range(8):
                body = control.write_from_memory(rkey, va + place * MIB, MIB // 2, 0, 1)
                if number % 2:
                    body = control.read(rkey, va + place * MIB, MIB // 2)
                attacker.send_message(message(READ if number % 2 else WRITE, body))
            attacker.peer.close()
        self.expect_node_serves()
        # This is longer than all retries to the last client.
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            self.expect_node_serves()
            time.sleep(0.1)

    def test_vanished_clients_are_evicted_for_new_ones(self):
        """More clients than a node accepts, from a socket that is closed before the node sends keepalives."""
        peer = self.peer()
        connected = 0
        for number in range(1100):
            # A full node may reject a client.
            with contextlib.suppress(NoAnswer):
                ControlClient(peer, self.address, 0x1000 + number, attempts=2)
                connected += 1
        peer.close()
        self.assertGreater(connected, 500)
        deadline, newcomer = time.monotonic() + 20, self.peer()
        while True:
            try:
                self.assertEqual(ControlClient(newcomer, self.address).find("r"), self.region)
                return
            except NoAnswer:
                self.assertLess(time.monotonic(), deadline)

    def test_readers_that_drain_no_responses_do_not_use_up_buffers(self):
        """READs of the whole region, repeatedly over several connections. Every answer gets an RNR NAK."""
        rkey, va, length, region_id = self.region
        self.witness.grant(rkey, region_id)
        peer = self.peer()
        liars = {}
        for _ in range(4):
            attacker = ControlClient(peer, self.address, next(self.qpns))
            attacker.grant(rkey, region_id)
            liars[attacker.qpn] = attacker
            for _ in range(30):
                attacker.send_message(message(READ, control.read(rkey, va, length)))
        for number in range(32):
            while (packet := peer.receive(0.01)) is not None:
                if packet.qpn in liars and packet.opcode != roce.ACKNOWLEDGE:
                    liars[packet.qpn].acknowledge(packet.psn, roce.RNR_NAK)
            self.assertEqual(self.read_by_request(self.witness, va + number % 8 * MIB, 32 << 10), bytes(32 << 10))
        self.expect_node_serves()

    def read_by_request(self, client, va, size):
        """The data that a READ request returns, packet by packet."""
        client.send_message(message(READ, control.read(self.region[0], va, size)))
        data, header = b"", 16
        while len(data) < size:
            packet = client.receive_packet()
            if packet.psn != client.expected_psn:
                continue
            client.expected_psn = packet.psn + 1 & roce.PSN_MASK
            last = packet.opcode == roce.WRITE_LAST_IMM
            data += packet.body[4 if last else header:]
            header = 0
            client.acknowledge(packet.psn)
        return data

    def queue_pairs(self):
        return stat(self.process.pid)["objects"]["queue_pairs"]

    def test_silent_clients_are_evicted(self):
        """Connection requests from more addresses than the node has connections, with no packet after them."""
        before = self.queue_pairs()
        for number in range(1500):
            stranger = roce.Peer(f"127.{100 + os.getpid() % 100}.{number // 250 + 1}.{number % 250 + 1}")
            datagram = control.connection_request(number, 0x300, 0)
            header = roce.bth(roce.UD_SEND_ONLY, 1, 0)
            stranger.packet(self.address, header, roce.deth(control.QKEY_OF_MANAGEMENT, 1), datagram)
            stranger.close()
            if number % 50 == 0:
                time.sleep(0.02)
                self.expect_node_serves()
        self.assertGreater(self.queue_pairs() - before, 400)
        self.assertLessEqual(self.queue_pairs() - before, 768)
        self.assertEqual(self.client().find("r"), self.region)
        self.expect_node_serves()

    def test_clients_per_address_are_limited(self):
        peer = self.peer()
        with self.assertRaises(NoAnswer):
            for count in range(140):
                self.assertEqual(ControlClient(peer, self.address, next(self.qpns), attempts=3).find("r"), self.region)
        self.assertEqual(count, 128)
        self.assertEqual(self.client().find("r"), self.region)
        self.expect_node_serves()


if __name__ == "__main__":
    unittest.main()
