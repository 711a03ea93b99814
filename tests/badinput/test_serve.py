"""`terrace serve`: a refusal is one line that says what to do. Clients that lie to a node, or vanish in the middle of a
request, harm only themselves. `crates/cli/tests/storage_failures.rs` has disks that fail, fill up and shrink."""

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
from control import (ACCESS_DENIED, COUNTS, DONE, FIND, FOUND, INVALID, MAGIC, NO_SUCH_REGION, OK, OPEN, OPENED, OUT_OF_RANGE,
                     PAIR, PAIRED, READ, WRITE, Silence, Talker, message)
from support import TERRACE, USAGE, assert_refused, fresh_address

from harness import cgroup  # noqa: E402  (support has set the path)
from harness.endpoint import stat  # noqa: E402

MIB = 1 << 20
REFUSED = 1


class Serving(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.directory.chmod(0o755)
        self.command = TERRACE

    def path(self, name, size=None):
        path = self.directory / name
        if size is not None:
            path.write_bytes(b"")
            os.truncate(path, size)
        return path

    def argv(self, *arguments, wrapper=(), address=None):
        return [*wrapper, self.command, "serve", "--listen", address or fresh_address(), *map(str, arguments)]

    def node(self, *arguments):
        """A node that serves; returns its process and address."""
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


class Refusals(Serving):
    def refused(self, said, *arguments, status=REFUSED, **options):
        argv = self.argv(*arguments, **options)
        outcome = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
        assert_refused(self, outcome, status, said)

    def test_files_that_are_not_there(self):
        self.refused("does not exist; give a size", "--region", f"r={self.path('none')}", "--dram", "1M")
        self.assertFalse(self.path("none").exists())
        self.refused("No such file or directory", "--region", "r=/no/such/directory/r:1M", "--dram", "1M")

    def test_what_is_no_file(self):
        self.refused("cannot open", "--region", f"r={self.directory}:1M", "--dram", "1M")
        self.refused("neither a regular file nor a block device", "--region", "r=/dev/null:1M", "--dram", "1M")
        pipe = self.path("pipe")
        os.mkfifo(pipe)
        self.refused("neither a regular file nor a block device", "--region", f"r={pipe}:1M", "--dram", "1M")

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("setpriv"), "needs root and setpriv")
    def test_files_that_may_not_be_written(self):
        """Root may write any file, so the command runs as another user."""
        self.command = shutil.copy(TERRACE, self.directory / "terrace")
        path = self.path("readonly", MIB)
        path.chmod(0o444)
        nobody = ("setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all", "--")
        self.refused("for reading and writing: Permission denied", "--region", f"r={path}", "--dram", "1M", wrapper=nobody)
        self.refused("Permission denied", "--region", f"r={self.path('new')}:1M", "--dram", "1M", wrapper=nobody)

    def test_sizes_that_cannot_be(self):
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
        self.refused("cannot be named \"a\"", "--region", f"a={region}", "--region", f"a={region}", "--dram", "1M")
        self.refused("cannot be named", "--region", f"{'x' * 256}={region}", "--dram", "1M")
        for nonsense in ("", "r", "=x", "r="):
            self.refused("--region", "--region", nonsense, "--dram", "1M", status=USAGE)

    def test_two_servers_of_one_file(self):
        path = self.path("r", 8 * MIB)
        process, _ = self.node("--region", f"r={path}", "--dram", "2M")
        self.refused("another server has it locked", "--region", f"r={path}", "--dram", "2M")
        self.assertIsNone(process.poll())

    def test_one_file_twice(self):
        path = self.path("r", 8 * MIB)
        self.refused("locked", "--region", f"a={path}", "--region", f"b={path}", "--dram", "2M")

    def test_budgets_that_cannot_be(self):
        region = f"r={self.path('r', 8 * MIB)}"
        self.refused("of memory that this machine has", "--region", region, "--dram", "100T")
        self.refused("make the budget larger", "--region", region, "--dram", "4M", "--mode", "pin")
        for nonsense in ("much", "-1", ""):
            self.refused("--dram", "--region", region, f"--dram={nonsense}", status=USAGE)

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("setpriv"), "needs root and setpriv")
    def test_a_budget_above_the_memlock_limit(self):
        wrapper = ("prlimit", "--memlock=8388608:8388608", "setpriv", "--bounding-set=-ipc_lock,-sys_resource",
                   "--inh-caps=-ipc_lock,-sys_resource")
        self.refused("ulimit -l", "--region", f"r={self.path('r', 8 * MIB)}", "--dram", "64M", wrapper=wrapper)

    def test_a_budget_above_the_control_groups_limit(self):
        try:
            group = self.enterContext(cgroup.memory_group(f"terrace-badinput-serve-{os.getpid()}", 64 * MIB))
        except cgroup.Unavailable as unavailable:
            self.skipTest(str(unavailable))
        self.refused("control group", "--region", f"r={self.path('r', 8 * MIB)}", "--dram", "128M", wrapper=group.argv([]))

    def test_addresses_that_are_not_ours(self):
        region = ("--region", f"r={self.path('r', MIB)}", "--dram", "1M")
        self.refused("not an address of this machine", *region, address="192.0.2.199")
        self.refused("192.0.2.199:1", *region, "--metrics", "192.0.2.199:1")


class Lies(Serving):
    """A node, lying clients, and an honest client that sends a request after each lie."""

    def setUp(self):
        super().setUp()
        self.process, self.address = self.node("--region", f"r={self.path('r', 8 * MIB)}", "--dram", "2M")
        # A talker uses two queue pair numbers: its control queue pair, and the next one for the queue pair that it may
        # request.
        self.qpns = iter(range(0x0400, 0x8000, 2))
        self.witness = self.talker()
        self.region = self.witness.find("r")

    def peer(self):
        peer = roce.Peer(fresh_address())
        self.addCleanup(peer.close)
        return peer

    def talker(self):
        return Talker(self.peer(), self.address, next(self.qpns))

    def expect_peace(self):
        """The node still serves other clients."""
        self.assertIsNone(self.process.poll())
        self.assertEqual(self.witness.find("r"), self.region)

    def expect_end(self, liar):
        """The node has ended this connection, and serves others."""
        with self.assertRaises(Silence):
            liar.request(FIND, b"r", patience=0.2)
        self.expect_peace()

    def test_a_node_sends_to_its_clients_addresses_only(self):
        """The number of the queue pair that a client names selects a port; nothing that it sends selects an address."""
        talker = self.talker()
        talker.find("r")
        for qpn in (0x300, 0x7F_0300, 0xFF_FFFE):
            kind, _, _ = talker.request(PAIR, struct.pack("<IIH", qpn, 0, control.MTU))
            self.assertEqual(kind, PAIRED)
        remotes = [pair["remote"] for pair in stat(self.process.pid)["queue_pairs"] if pair["remote"]]
        addresses = {remote.rsplit(":", 1)[0] for remote in remotes}
        self.assertEqual(addresses, {talker.peer.address, self.witness.peer.address})
        self.assertEqual(sum(remote.startswith(f"{talker.peer.address}:") for remote in remotes), 4)

    def test_messages_that_make_no_sense_end_their_connection(self):
        rkey, va, length, region_id = self.region
        lies = {
            "nothing": b"",
            "a part of a header": message(FIND, b"r")[:9],
            "another version": message(FIND, b"r", version=1),
            "an unknown kind": message(99),
            "a status in a request": message(FIND, b"r", status=3),
            "an unknown status": message(DONE, status=999),
            "longer than it says": message(FIND, b"r", length=16),
            "shorter than it says": message(FIND, b"r", length=1 << 31),
            "a name that is none": message(FIND, b"\xff\xfe"),
            "no name": message(FIND),
            "too long a name": message(FIND, b"x" * 256),
            "a short body": message(OPEN, b"x" * 7),
            "a long body": message(OPEN, bytes(17)),
            "reserved bytes": message(OPEN, b"\1" * 16),
            "no bytes to read": message(READ, control.read(rkey, va, 0)),
            "an address that wraps": message(READ, control.read(rkey, (1 << 64) - 8, 16)),
            "a destination that wraps": message(READ, control.read(rkey, va, 16, ((1 << 64) - 8, 1))),
            "too many pages": message(READ, control.read(rkey, va, 16, page_count=1 << 31)),
            "pages without a bitmap": message(READ, control.read(rkey, va, 4096, page_count=1)),
            "pages beyond": message(READ, control.read(rkey, va, 4096, page_count=1, words=[2])),
            "less data than it says": message(WRITE, control.write(rkey, va, b"abc", length=4)),
            "more data than it says": message(WRITE, control.write(rkey, va, b"abc", length=2)),
            "a source of nowhere": message(WRITE, struct.pack("<IIQIB3xQ", rkey, 4, va, 0, 9, 0)),
            "a switch that is neither on nor off": message(MAGIC, control.magic(1, 2, rkey, region_id, on=2)),
            "a path MTU that is none": message(PAIR, struct.pack("<IIH", 0x300, 0, 1000)),
            "counters without end": message(COUNTS, struct.pack("<IIQQII", 1, (1 << 32) - 1, 0, region_id, rkey, 5)),
        }
        peer = self.peer()
        for what, lie in lies.items():
            with self.subTest(what):
                liar = Talker(peer, self.address, next(self.qpns))
                liar.say(lie)
                self.expect_end(liar)

    def test_noise(self):
        noise = random.Random(3)
        liar = self.talker()
        for _ in range(60):
            if noise.random() < 0.5:
                data = noise.randbytes(noise.randrange(200))
            else:
                data = message(noise.randrange(1, 12), noise.randbytes(noise.randrange(64)))
            liar.say(data)
            try:
                liar.answer(0.05)
            except Silence:
                liar = Talker(liar.peer, self.address, next(self.qpns))
        self.expect_peace()

    def test_what_a_client_may_not_do_is_refused(self):
        rkey, va, length, region_id = self.region
        liar = self.talker()

        def refused(status, kind, body):
            self.assertEqual(liar.request(kind, body)[:2], (DONE, status))

        # No queue pair of this client has shown that it may use the region.
        refused(ACCESS_DENIED, OPEN, struct.pack("<I4xQ", rkey, region_id))
        refused(ACCESS_DENIED, READ, control.read(rkey, va, 16))
        refused(ACCESS_DENIED, WRITE, control.write(rkey, va, b"data"))
        for server_qpn in (0, 1, liar.server_qpn, 0x123456):
            refused(ACCESS_DENIED, MAGIC, control.magic(liar.qpn, server_qpn, rkey, region_id))
        refused(NO_SUCH_REGION, MAGIC, control.magic(liar.qpn, 0, rkey ^ 1, region_id))
        refused(NO_SUCH_REGION, FIND, b"another")
        for kind, body in ((OPENED, bytes(48)), (DONE, b""), (PAIRED, struct.pack("<IIH", 1, 0, 1024))):
            refused(INVALID, kind, body)
        kind, _, body = liar.request(PAIR, struct.pack("<IIH", 0x999, 0, 1024))
        self.assertEqual(kind, PAIRED)
        # A queue pair of this client, but a wrong number for the client's end.
        refused(ACCESS_DENIED, MAGIC, control.magic(0x998, struct.unpack_from("<I", body)[0], rkey, region_id))
        liar.grant(rkey, region_id)
        for at, size in ((va + length, 1), (va + length - 8, 9), (va + length // 2, length), (1 << 62, 8)):
            refused(OUT_OF_RANGE, READ, control.read(rkey, at, size))
            refused(OUT_OF_RANGE, WRITE, control.write_from_memory(rkey, at, size, 0, 1))
        refused(INVALID, READ, control.read(rkey, va, 4096, page_count=2, offset=5, words=[1]))
        refused(NO_SUCH_REGION, OPEN, struct.pack("<I4xQ", rkey, region_id ^ 1))
        refused(ACCESS_DENIED, READ, control.read(rkey ^ 1, va, 8))
        refused(OK, WRITE, control.write(rkey, va + 5, b"data"))
        self.expect_peace()

    def test_a_destination_that_does_not_let_the_node_in(self):
        rkey, va, _, region_id = self.region
        liar = self.talker()
        liar.grant(rkey, region_id)
        liar.say(message(READ, control.read(rkey, va, 16)))
        packet = liar.listen()
        self.assertEqual(packet.opcode, roce.WRITE_ONLY_IMM, "the answer travels with the data")
        liar.acknowledge(packet.psn, roce.NAK_ACCESS)
        self.expect_end(liar)

    def test_gone_in_the_middle_of_requests(self):
        """Clients vanish after WRITE requests whose data they never serve, or READ requests whose answers they never
        take."""
        rkey, va, _, region_id = self.region
        for number in range(6):
            liar = self.talker()
            liar.grant(rkey, region_id)
            for place in range(8):
                body = control.write_from_memory(rkey, va + place * MIB, MIB // 2, 0, 1)
                if number % 2:
                    body = control.read(rkey, va + place * MIB, MIB // 2)
                liar.say(message(READ if number % 2 else WRITE, body))
            liar.peer.close()
        self.expect_peace()
        # Longer than the last retry of the last client.
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            self.expect_peace()
            time.sleep(0.1)

    def test_clients_that_left_without_a_word_make_room_for_others(self):
        """More clients than a node takes at a time, from a socket that is closed before the node sends keepalives."""
        peer = self.peer()
        connected = 0
        for number in range(1100):
            # A full node may refuse a client.
            with contextlib.suppress(Silence):
                Talker(peer, self.address, 0x1000 + number, attempts=2)
                connected += 1
        peer.close()
        self.assertGreater(connected, 500)
        deadline, newcomer = time.monotonic() + 20, self.peer()
        while True:
            try:
                self.assertEqual(Talker(newcomer, self.address).find("r"), self.region)
                return
            except Silence:
                self.assertLess(time.monotonic(), deadline)

    def test_readers_that_take_nothing_leave_buffers_to_others(self):
        """READs of all of the region, many times over several connections; every answer gets an RNR NAK."""
        rkey, va, length, region_id = self.region
        self.witness.grant(rkey, region_id)
        peer = self.peer()
        liars = {}
        for _ in range(4):
            liar = Talker(peer, self.address, next(self.qpns))
            liar.grant(rkey, region_id)
            liars[liar.qpn] = liar
            for _ in range(30):
                liar.say(message(READ, control.read(rkey, va, length)))
        for number in range(32):
            while (packet := peer.receive(0.01)) is not None:
                if packet.qpn in liars and packet.opcode != roce.ACKNOWLEDGE:
                    liars[packet.qpn].acknowledge(packet.psn, roce.RNR_NAK)
            self.assertEqual(self.read_by_request(self.witness, va + number % 8 * MIB, 32 << 10), bytes(32 << 10))
        self.expect_peace()

    def read_by_request(self, talker, va, size):
        """The data that a READ request returns, packet by packet."""
        talker.say(message(READ, control.read(self.region[0], va, size)))
        data, header = b"", 16
        while len(data) < size:
            packet = talker.listen()
            if packet.psn != talker.expected_psn:
                continue
            talker.expected_psn = packet.psn + 1 & roce.PSN_MASK
            last = packet.opcode == roce.WRITE_LAST_IMM
            data += packet.body[4 if last else header:]
            header = 0
            talker.acknowledge(packet.psn)
        return data

    def queue_pairs(self):
        return stat(self.process.pid)["objects"]["queue_pairs"]

    def test_clients_that_never_speak_make_way(self):
        """Connection requests from more addresses than the node has connections for, with no packet after them."""
        before = self.queue_pairs()
        for number in range(1500):
            stranger = roce.Peer(f"127.{100 + os.getpid() % 100}.{number // 250 + 1}.{number % 250 + 1}")
            datagram = control.connection_request(number, 0x300, 0)
            header = roce.bth(roce.UD_SEND_ONLY, 1, 0)
            stranger.packet(self.address, header, roce.deth(control.QKEY_OF_MANAGEMENT, 1), datagram)
            stranger.close()
            if number % 50 == 0:
                time.sleep(0.02)
                self.expect_peace()
        self.assertGreater(self.queue_pairs() - before, 400)
        self.assertLessEqual(self.queue_pairs() - before, 768)
        self.assertEqual(self.talker().find("r"), self.region)
        self.expect_peace()

    def test_an_address_has_so_many_clients_and_no_more(self):
        peer = self.peer()
        with self.assertRaises(Silence):
            for count in range(140):
                self.assertEqual(Talker(peer, self.address, next(self.qpns), attempts=3).find("r"), self.region)
        self.assertEqual(count, 128)
        self.assertEqual(self.talker().find("r"), self.region)
        self.expect_peace()


if __name__ == "__main__":
    unittest.main()
