"""Connections by address: with a peer that uses parts of the standard that Linux and Terrace do not use, by the loopback
address, and with a peer that is killed."""

import os
import signal
import struct
import tempfile

import pytest
import roce
from support import NegativeTest, fresh_address, procs

TIMEOUT_S = 10.0
MANAGEMENT_QPN, MANAGEMENT_QKEY = 1, 0x80010000
# Communication management: base version, class, class version, method; attributes (IBTA volume 1, chapter 12).
CLASS_HEADER = bytes([1, 7, 2, 3])
REQ, REJ, SIDR_REQ = 0x10, 0x12, 0x17
REDIRECT, CONSUMER_DEFINED = 24, 28
# No Terrace process has this instance index, so its port is free for the test.
UNUSED_INSTANCE = 3


class Manager(roce.Peer):
    """Queue pair 1 of an address, at the UDP port of an instance index."""

    def __init__(self, address, instance=0):
        super().__init__(address, instance << 16 | MANAGEMENT_QPN)

    def next_mad(self):
        """The next management datagram: the sender's queue pair, and the bytes. None on timeout."""
        packet = self.receive(TIMEOUT_S)
        if packet is None:
            return None
        assert (packet.opcode, packet.qpn) == (roce.UD_SEND_ONLY, self.qpn), packet
        qkey, source_qpn = struct.unpack("!II", packet.body[:8])
        assert qkey == MANAGEMENT_QKEY, hex(qkey)
        return source_qpn, packet.body[8:]

    def reject(self, address, source_qpn, req, reason, info=b""):
        """Answers a REQ with a REJ."""
        (communication_id,) = struct.unpack_from("!I", req, 24)
        refusal = struct.pack("!IIBBH", 0, communication_id, 0, len(info) << 1, reason) + info.ljust(72, b"\0")
        header = CLASS_HEADER + bytes(4) + req[8:16] + struct.pack("!HHI", REJ, 0, 0)
        header_bytes = roce.bth(roce.UD_SEND_ONLY, source_qpn, 0) + roce.deth(MANAGEMENT_QKEY, self.qpn)
        self.packet(address, header_bytes, (header + refusal).ljust(256, b"\0"))


# The limit of a detection, which takes 0.8 s, or 2.0 s in a quarter of runs, on an idle machine.
DETECTED_WITHIN_S = 5.0
TALK = procs.ROOT / "build/interop/programs/cm_talk"


def attribute(mad):
    assert mad[:4] == CLASS_HEADER, mad[:4].hex()
    return struct.unpack_from("!H", mad, 16)[0]


def class_port_info(qpn):
    """A ClassPortInfo that redirects to this queue pair (IBTA volume 1, 13.4.8.1)."""
    return bytes([1, 2]) + bytes(28) + struct.pack("!HII", roce.PKEY, qpn, MANAGEMENT_QKEY) + bytes(32)


class Redirected(NegativeTest):
    def setUp(self):
        self.client_address, self.server_address = fresh_address(), fresh_address()
        self.first, self.second = Manager(self.server_address), Manager(self.server_address, UNUSED_INSTANCE)
        self.addCleanup(self.first.close)
        self.addCleanup(self.second.close)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        command = procs.under_terrace(["rping", "-c", "-v", "-C", "1", "-a", self.server_address, "-p", "7000"], addr=self.client_address)
        self.client = procs.Program(command, folder.name, "client")
        self.addCleanup(self.client.stop)

    def output_after_exit(self):
        self.assertIsNotNone(self.client.wait(TIMEOUT_S), "the client ends")
        return self.client.outcome().text

    def test_a_client_follows_a_redirect(self):
        source, req = self.first.next_mad()
        self.assertEqual(attribute(req), REQ)
        self.first.reject(self.client_address, source, req, REDIRECT, class_port_info(self.second.qpn))
        source, again = self.second.next_mad()
        self.assertEqual(again, req)
        # A datagram of the redirecting queue pair is ignored.
        self.first.reject(self.client_address, source, req, CONSUMER_DEFINED)
        self.assertIsNone(self.client.wait(0.1))
        self.second.reject(self.client_address, source, req, CONSUMER_DEFINED)
        self.assertIn(f"error {CONSUMER_DEFINED}", self.output_after_exit().replace("-", ""))

    def test_a_client_does_not_follow_redirect_loops(self):
        managers = [self.first, self.second]
        source, req = self.first.next_mad()
        for turn in range(2):
            self.assertEqual(attribute(req), REQ)
            current, other = managers[turn % 2], managers[1 - turn % 2]
            current.reject(self.client_address, source, req, REDIRECT, class_port_info(other.qpn))
            source, req = other.next_mad()
        self.first.reject(self.client_address, source, req, REDIRECT, class_port_info(self.second.qpn))
        self.assertIn(f"error {REDIRECT}", self.output_after_exit().replace("-", ""))


class Programs(NegativeTest):
    """Two programs that connect and print their events (tests/interop/programs/cm_talk.c)."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.port, self.options = folder.name, procs.free_port(), ()

    def start_program(self, name, own_address, *arguments):
        command = procs.under_terrace([TALK, *arguments], *self.options, addr=own_address)
        program = procs.Program(command, self.folder, name)
        self.addCleanup(program.stop)
        return program

    def serve(self, own_address, address):
        server = self.start_program("server", own_address, "server", address, str(self.port), "accept", "1")
        self.eventually(lambda: procs.is_listening(self.port), "the server listens")
        return server

    def connect_program(self, own_address, address, manner):
        return self.start_program("client", own_address, "client", address, str(self.port), manner)

    def test_loopback_addresses_reach_the_device(self):
        """127.0.0.1 and 0.0.0.0 reach a device that has another address."""
        own = fresh_address()
        server = self.serve(own, "127.0.0.1")
        client = self.connect_program(own, "127.0.0.1", "leave")
        for program in (client, server):
            self.assertEqual(program.wait(TIMEOUT_S), 0, program.outcome().text)
            self.assertIn("RDMA_CM_EVENT_DISCONNECTED status 0", program.outcome().text)

    def idle_and_killed(self, own, peer, killed):
        """Kills one end of an idle connection. Returns the other end."""
        ends = {"server": self.serve(peer, peer), "client": self.connect_program(own, peer, "idle")}
        for program in ends.values():
            self.eventually(lambda: "RDMA_CM_EVENT_ESTABLISHED" in program.paths[0].read_text(), "the connection is established")
        victim = ends.pop(killed)
        os.killpg(victim.process.pid, signal.SIGKILL)
        victim.wait(TIMEOUT_S)
        self.assertEqual(victim.outcome().status, -signal.SIGKILL)
        return ends.popitem()[1]

    @pytest.mark.alone
    def test_a_killed_peer_is_detected(self):
        """On one host either end is notified immediately, at one address or two, although the connection sends
        nothing."""
        for killed in ("server", "client"):
            for addresses in ((fresh_address(), fresh_address()), (fresh_address(),) * 2):
                with self.subTest(killed=killed, addresses=addresses):
                    survivor = self.idle_and_killed(*addresses, killed)
                    self.assertEqual(survivor.wait(DETECTED_WITHIN_S), 0, survivor.paths[0].read_text())
                    self.assertIn("RDMA_CM_EVENT_DISCONNECTED status 0", survivor.outcome().text)

    @pytest.mark.alone
    def test_a_killed_peer_is_detected_over_the_network(self):
        """Over UDP only, as between hosts: the peer's host answers a keepalive probe, sent at least every 20 s, with an ICMP error."""
        self.options = ("--path", "udp")
        survivor = self.idle_and_killed(fresh_address(), fresh_address(), "server")
        status = survivor.wait(20.0 + DETECTED_WITHIN_S)
        self.assertIn("RDMA_CM_EVENT_DISCONNECTED status 0", survivor.paths[0].read_text())
        self.assertEqual((status, survivor.outcome().status), (0, 0))
