"""Connections by address: with a peer that uses parts of the standard that Linux and Terrace do not; by the loopback
address; with a peer that is killed."""

import os
import signal
import struct
import tempfile

import roce
from support import BadInput, fresh_address, procs

PATIENCE_S = 10.0
MANAGEMENT_QPN, MANAGEMENT_QKEY = 1, 0x80010000
# Communication management: base version, class, class version, method; attributes (IBTA volume 1, chapter 12).
CLASS_HEADER = bytes([1, 7, 2, 3])
REQ, REJ, SIDR_REQ = 0x10, 0x12, 0x17
REDIRECT, CONSUMER_DEFINED = 24, 28
# A slot that no Terrace process has, so that its port is free for the test.
ELSEWHERE = 3


class Manager(roce.Peer):
    """Queue pair 1 of a host, at the UDP port of a slot."""

    def __init__(self, address, slot=0):
        super().__init__(address, slot << 16 | MANAGEMENT_QPN)

    def next_mad(self):
        """The next management datagram: the sender's queue pair, and the bytes. None on timeout."""
        packet = self.receive(PATIENCE_S)
        if packet is None:
            return None
        assert (packet.opcode, packet.qpn) == (roce.UD_SEND_ONLY, self.qpn), packet
        qkey, source_qpn = struct.unpack("!II", packet.body[:8])
        assert qkey == MANAGEMENT_QKEY, hex(qkey)
        return source_qpn, packet.body[8:]

    def refuse(self, address, source_qpn, req, reason, info=b""):
        """Answers a REQ with a REJ."""
        (name,) = struct.unpack_from("!I", req, 24)
        refusal = struct.pack("!IIBBH", 0, name, 0, len(info) << 1, reason) + info.ljust(72, b"\0")
        header = CLASS_HEADER + bytes(4) + req[8:16] + struct.pack("!HHI", REJ, 0, 0)
        header_bytes = roce.bth(roce.UD_SEND_ONLY, source_qpn, 0) + roce.deth(MANAGEMENT_QKEY, self.qpn)
        self.packet(address, header_bytes, (header + refusal).ljust(256, b"\0"))


# On an idle machine it takes a second.
MISSED_WITHIN_S = 5.0
TALK = procs.ROOT / "build/interop/programs/cm_talk"


def attribute(mad):
    assert mad[:4] == CLASS_HEADER, mad[:4].hex()
    return struct.unpack_from("!H", mad, 16)[0]


def class_port_info(qpn):
    """A ClassPortInfo that redirects to this queue pair (IBTA volume 1, 13.4.8.1)."""
    return bytes([1, 2]) + bytes(28) + struct.pack("!HII", roce.PKEY, qpn, MANAGEMENT_QKEY) + bytes(32)


class Redirected(BadInput):
    def setUp(self):
        self.asker, self.asked = fresh_address(), fresh_address()
        self.first, self.second = Manager(self.asked), Manager(self.asked, ELSEWHERE)
        self.addCleanup(self.first.close)
        self.addCleanup(self.second.close)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        command = procs.under_terrace(["rping", "-c", "-v", "-C", "1", "-a", self.asked, "-p", "7000"], addr=self.asker)
        self.client = procs.Program(command, folder.name, "client")
        self.addCleanup(self.client.stop)

    def ended(self):
        self.assertIsNotNone(self.client.wait(PATIENCE_S), "the client ends")
        return self.client.outcome().text

    def test_a_client_asks_where_it_is_sent(self):
        source, req = self.first.next_mad()
        self.assertEqual(attribute(req), REQ)
        self.first.refuse(self.asker, source, req, REDIRECT, class_port_info(self.second.qpn))
        source, again = self.second.next_mad()
        self.assertEqual(again, req)
        # A datagram of the queue pair that redirected is ignored.
        self.first.refuse(self.asker, source, req, CONSUMER_DEFINED)
        self.assertIsNone(self.client.wait(0.1))
        self.second.refuse(self.asker, source, req, CONSUMER_DEFINED)
        self.assertIn(f"error {CONSUMER_DEFINED}", self.ended().replace("-", ""))

    def test_a_client_is_not_sent_in_circles(self):
        managers = [self.first, self.second]
        source, req = self.first.next_mad()
        for turn in range(2):
            self.assertEqual(attribute(req), REQ)
            asked, other = managers[turn % 2], managers[1 - turn % 2]
            asked.refuse(self.asker, source, req, REDIRECT, class_port_info(other.qpn))
            source, req = other.next_mad()
        self.first.refuse(self.asker, source, req, REDIRECT, class_port_info(self.second.qpn))
        self.assertIn(f"error {REDIRECT}", self.ended().replace("-", ""))


class Talking(BadInput):
    """Two programs that connect and print their events (tests/interop/programs/cm_talk.c)."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.port, self.options = folder.name, procs.free_port(), ()

    def talk(self, name, own_address, *arguments):
        command = procs.under_terrace([TALK, *arguments], *self.options, addr=own_address)
        program = procs.Program(command, self.folder, name)
        self.addCleanup(program.stop)
        return program

    def serve(self, own_address, address):
        server = self.talk("server", own_address, "server", address, str(self.port), "accept", "1")
        self.eventually(lambda: procs.is_listening(self.port), "the server listens")
        return server

    def ask(self, own_address, address, manner):
        return self.talk("client", own_address, "client", address, str(self.port), manner)

    def test_the_loopback_is_any_address(self):
        """127.0.0.1 and 0.0.0.0 reach a device that has another address."""
        own = fresh_address()
        server = self.serve(own, "127.0.0.1")
        client = self.ask(own, "127.0.0.1", "leave")
        for program in (client, server):
            self.assertEqual(program.wait(PATIENCE_S), 0, program.outcome().text)
            self.assertIn("RDMA_CM_EVENT_DISCONNECTED status 0", program.outcome().text)

    def idle_and_killed(self, own, peer, killed):
        """Kills one end of an idle connection. Returns the other end."""
        ends = {"server": self.serve(peer, peer), "client": self.ask(own, peer, "idle")}
        for program in ends.values():
            self.eventually(lambda: "RDMA_CM_EVENT_ESTABLISHED" in program.paths[0].read_text(), "it is established")
        victim = ends.pop(killed)
        os.killpg(victim.process.pid, signal.SIGKILL)
        victim.wait(PATIENCE_S)
        self.assertEqual(victim.outcome().status, -signal.SIGKILL)
        return ends.popitem()[1]

    def test_a_peer_that_is_killed_is_missed(self):
        """On one host either end notices at once, at one address or two, although the connection itself sends
        nothing."""
        for killed in ("server", "client"):
            for addresses in ((fresh_address(), fresh_address()), (fresh_address(),) * 2):
                with self.subTest(killed=killed, addresses=addresses):
                    survivor = self.idle_and_killed(*addresses, killed)
                    self.assertEqual(survivor.wait(MISSED_WITHIN_S), 0, survivor.paths[0].read_text())
                    self.assertIn("RDMA_CM_EVENT_DISCONNECTED status 0", survivor.outcome().text)

    def test_a_peer_that_is_killed_is_missed_over_the_network(self):
        """Over UDP only, as between hosts: a probe, sent every 20 s at the latest, is refused by the peer's host."""
        self.options = ("--path", "udp")
        survivor = self.idle_and_killed(fresh_address(), fresh_address(), "server")
        status = survivor.wait(20.0 + MISSED_WITHIN_S)
        self.assertIn("RDMA_CM_EVENT_DISCONNECTED status 0", survivor.paths[0].read_text())
        self.assertEqual((status, survivor.outcome().status), (0, 0))
