"""Forwarding: packets at an address's port 4791 for another process of that address are forwarded unchanged, and
all other packets are dropped."""

import contextlib
import ipaddress
import os
import socket
import struct
import unittest

import roce
from support import SUCCESS, NegativeTest, fresh_address

PSN = 0x0ABCDE
SIZE = 65536
QKEY = 0x80010000
A_PACKET = 1
ANOTHER_USER = 65534


@contextlib.contextmanager
def as_another_user():
    """Sockets opened in this context belong to another user."""
    os.seteuid(ANOTHER_USER)
    try:
        yield
    finally:
        os.seteuid(0)


def wrapped(packet, source):
    """A packet as one process forwards it to another (crates/nic/src/forwarding/messages.rs)."""
    address = ipaddress.IPv6Address("::ffff:" + source[0]).packed
    return struct.pack("!BBH", A_PACKET, 0, source[1]) + address + packet


class TwoInstances(NegativeTest):
    """A process whose instance index is not 0, with a queue pair that is connected to a peer."""

    def connect_second(self):
        self.peer = roce.Peer(fresh_address())
        self.addCleanup(self.peer.close)
        self.region = self.home.mr("m", "anon", SIZE)
        self.home("fill", "m", 0, SIZE, 1)
        self.qpn = self.home.qp("q")
        self.home("connect", "q", self.peer.address, self.peer.qpn, f"rq_psn={PSN}", f"sq_psn={PSN}")

    def request(self, length, psn=PSN):
        """A READ request to the second process."""
        reth = roce.reth(self.region["addr"], self.region["rkey"], length)
        return roce.bth(roce.READ_REQUEST, self.qpn, psn, ack=True) + reth

    def send(self, body, peer=None, port=roce.PORT):
        peer, address = peer or self.peer, self.home.address
        peer.raw(body + roce.icrc(peer.socket.getsockname(), (address, port), body), address, port)

    def wrap(self, body, instance=1, qkey=QKEY):
        header = roce.bth(roce.UD_SEND_ONLY, instance << 16, 0) + roce.deth(qkey, 0)
        return header + wrapped(body, self.peer.socket.getsockname())


class Forwarded(TwoInstances):
    def setUp(self):
        self.demultiplexer = self.start()
        self.home = self.start(self.demultiplexer.address)
        self.assertEqual((self.demultiplexer.stat()["slot"], self.home.stat()["slot"]), (0, 1))
        self.connect_second()

    def test_a_packet_at_the_standard_port_arrives(self):
        for count, length in enumerate((16, 1024)):
            self.send(self.request(length, PSN + count))
            answer = self.peer.receive()
            self.assertEqual((answer.opcode, answer.psn, len(answer.body)),
                             (roce.RESPONSE_ONLY, PSN + count, 4 + length))
        self.assertEqual(self.demultiplexer.stat()["passed_on"], 2)
        self.assertEqual(self.demultiplexer.stat()["dropped"]["unknown_qp"], 0)

    def test_a_stream_arrives(self):
        """A burst of packets of the largest MTU arrives in order."""
        count, mtu = 15, 4096
        self.home("destroy", "q")
        self.qpn = self.home.qp("q")
        self.home("connect", "q", self.peer.address, self.peer.qpn, f"rq_psn={PSN}", f"sq_psn={PSN}", "mtu=5")
        for index in range(count):
            opcode = roce.WRITE_FIRST if index == 0 else roce.WRITE_LAST if index == count - 1 else roce.WRITE_MIDDLE
            reth = roce.reth(self.region["addr"], self.region["rkey"], count * mtu) if index == 0 else b""
            header = roce.bth(opcode, self.qpn, PSN + index, ack=index == count - 1)
            self.send(header + reth + bytes([index]) * mtu)
        answer = self.peer.receive()
        self.assertEqual((answer.opcode, answer.syndrome & 0x60, answer.psn), (roce.ACKNOWLEDGE, 0, PSN + count - 1))
        for index in range(count):
            (data,) = self.home("hex", "m", index * mtu, mtu)
            self.assertEqual(bytes.fromhex(data), bytes([index]) * mtu)

    def test_forged_forwarded_packets_are_dropped(self):
        """Wrapped packets over UDP: from another host or port, with the wrong instance index, or wrapped twice."""
        local = roce.Peer(self.demultiplexer.address, 5 << 16)
        self.addCleanup(local.close)
        request = self.request(16)
        home_port = roce.PORT + 1
        self.send(self.wrap(request), port=home_port)
        self.send(self.wrap(request), peer=local, port=home_port)
        self.send(self.wrap(request))
        self.send(self.wrap(request, instance=0))
        self.send(self.wrap(self.wrap(request)), port=home_port)
        self.assertIsNone(self.peer.receive(0.2))
        # The process at the standard port forwards this packet, which thereby is wrapped twice.
        self.send(self.wrap(self.wrap(request)))
        self.assertIsNone(self.peer.receive(0.2))
        self.send(request)
        self.assertEqual(self.peer.receive().psn, PSN)

    def forwarding_socket(self):
        """A connection to the socket on which the second process receives forwarded packets."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.addCleanup(end.close)
        end.connect(f"\0terrace/passing/{self.home.address}:{roce.PORT + 1}")
        return end

    @unittest.skipIf(os.geteuid() != 0, "needs root, to be another user")
    def test_only_the_same_user_and_root_may_forward(self):
        packet = wrapped(self.request(16), self.peer.socket.getsockname())
        with as_another_user():
            stranger = self.forwarding_socket()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stranger.send(packet)
        self.assertIsNone(self.peer.receive(0.2))
        with contextlib.suppress(ConnectionResetError):
            self.assertEqual(stranger.recv(1), b"")
        self.forwarding_socket().send(packet)
        self.assertEqual(self.peer.receive().psn, PSN)

    def test_invalid_messages_are_ignored(self):
        end = self.forwarding_socket()
        for message in (b"\0", b"\1" * 19, bytes(20), wrapped(b"", ("1.2.3.4", 5)), wrapped(b"\xff" * 7000, ("1.2.3.4", 5)), b"\2" * 9000):
            end.send(message)
        self.send(self.request(16))
        self.assertEqual(self.peer.receive().psn, PSN)

    def test_packets_for_unused_instance_indexes_are_dropped(self):
        body = self.request(16)
        for instance in (2, 77, 255):
            self.send(body[:5] + bytes([instance]) + body[6:])
        self.eventually(lambda: self.demultiplexer.stat()["passed_on"] == 3, "the packets are counted")
        self.assertEqual(self.home("state", "q")["state"], 3)

    def test_forwarding_continues_after_a_process_ended(self):
        self.home.stop()
        self.send(self.request(16))
        self.assertIsNone(self.peer.receive(0.1))
        self.demultiplexer.mr("m", "anon", SIZE)
        self.demultiplexer.qp("q")
        self.demultiplexer("connect", "q", self.peer.address, self.peer.qpn, f"rq_psn={PSN}", f"sq_psn={PSN}")
        self.demultiplexer("fill", "m", 0, 16, 1)
        self.demultiplexer("post", "q", "send", 1, "m", 0, 16, 0, 0)
        packet = self.peer.receive()
        self.send(roce.bth(roce.ACKNOWLEDGE, self.demultiplexer.qpns["q"], packet.psn) + roce.aeth(roce.ACK, 1))
        self.assertEqual(self.demultiplexer.status("q"), SUCCESS)


class DemultiplexerOfAnotherUser(TwoInstances):
    """Another user's process has the standard port. Packets that it forwards are dropped."""

    def setUp(self):
        if os.geteuid() != 0:
            self.skipTest("needs root, to be another user")
        address = fresh_address()
        with as_another_user():
            self.stranger = roce.Peer(address)
        self.addCleanup(self.stranger.close)
        self.home = self.start(address)
        self.assertEqual(self.home.stat()["slot"], 1)
        self.connect_second()

    def test_its_forwarded_packets_are_dropped(self):
        self.send(self.wrap(self.request(16)), peer=self.stranger, port=roce.PORT + 1)
        self.assertIsNone(self.peer.receive(0.3))
        self.send(self.request(16), port=roce.PORT + 1)
        self.assertEqual(self.peer.receive().psn, PSN)
