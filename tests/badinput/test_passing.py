"""Forwarding: packets at an address's port 4791 for another process of that address are passed on unchanged, and
nothing else is."""

import contextlib
import ipaddress
import os
import socket
import struct
import unittest

import roce
from support import SUCCESS, BadInput, fresh_address

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


class WithHome(BadInput):
    """A process whose slot is not 0, with a queue pair that is connected to a peer."""

    def connect_home(self):
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

    def wrap(self, body, slot=1, qkey=QKEY):
        header = roce.bth(roce.UD_SEND_ONLY, slot << 16, 0) + roce.deth(qkey, 0)
        return header + wrapped(body, self.peer.socket.getsockname())


class PassedOn(WithHome):
    def setUp(self):
        self.front = self.start()
        self.home = self.start(self.front.address)
        self.assertEqual((self.front.stat()["slot"], self.home.stat()["slot"]), (0, 1))
        self.connect_home()

    def test_a_packet_at_the_standard_port_arrives(self):
        for count, length in enumerate((16, 1024)):
            self.send(self.request(length, PSN + count))
            answer = self.peer.receive()
            self.assertEqual((answer.opcode, answer.psn, len(answer.body)),
                             (roce.RESPONSE_ONLY, PSN + count, 4 + length))
        self.assertEqual(self.front.stat()["passed_on"], 2)
        self.assertEqual(self.front.stat()["dropped"]["unknown_qp"], 0)

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

    def test_what_others_say_was_passed_on_is_not_believed(self):
        """Wrapped packets over UDP: from another host or port, for the wrong slot, or wrapped twice."""
        local = roce.Peer(self.front.address, 5 << 16)
        self.addCleanup(local.close)
        request = self.request(16)
        home_port = roce.PORT + 1
        self.send(self.wrap(request), port=home_port)
        self.send(self.wrap(request), peer=local, port=home_port)
        self.send(self.wrap(request))
        self.send(self.wrap(request, slot=0))
        self.send(self.wrap(self.wrap(request)), port=home_port)
        self.assertIsNone(self.peer.receive(0.2))
        # The process at the standard port forwards it: it then claims to be a forwarded packet that was forwarded
        # again.
        self.send(self.wrap(self.wrap(request)))
        self.assertIsNone(self.peer.receive(0.2))
        self.send(request)
        self.assertEqual(self.peer.receive().psn, PSN)

    def passing_socket(self):
        """A connection to the socket on which the second process takes forwarded packets."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.addCleanup(end.close)
        end.connect(f"\0terrace/passing/{self.home.address}:{roce.PORT + 1}")
        return end

    @unittest.skipIf(os.geteuid() != 0, "needs root, to be another user")
    def test_only_the_same_user_and_root_pass_on(self):
        packet = wrapped(self.request(16), self.peer.socket.getsockname())
        with as_another_user():
            stranger = self.passing_socket()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stranger.send(packet)
        self.assertIsNone(self.peer.receive(0.2))
        with contextlib.suppress(ConnectionResetError):
            self.assertEqual(stranger.recv(1), b"")
        self.passing_socket().send(packet)
        self.assertEqual(self.peer.receive().psn, PSN)

    def test_messages_that_make_no_sense_do_no_harm(self):
        end = self.passing_socket()
        for message in (b"\0", b"\1" * 19, bytes(20), wrapped(b"", ("1.2.3.4", 5)), wrapped(b"\xff" * 7000, ("1.2.3.4", 5)), b"\2" * 9000):
            end.send(message)
        self.send(self.request(16))
        self.assertEqual(self.peer.receive().psn, PSN)

    def test_for_nobody(self):
        body = self.request(16)
        for slot in (2, 77, 255):
            self.send(body[:5] + bytes([slot]) + body[6:])
        self.eventually(lambda: self.front.stat()["passed_on"] == 3, "they are counted")
        self.assertEqual(self.home("state", "q")["state"], 3)

    def test_a_process_that_ended_is_not_missed(self):
        self.home.stop()
        self.send(self.request(16))
        self.assertIsNone(self.peer.receive(0.1))
        self.front.mr("m", "anon", SIZE)
        self.front.qp("q")
        self.front("connect", "q", self.peer.address, self.peer.qpn, f"rq_psn={PSN}", f"sq_psn={PSN}")
        self.front("fill", "m", 0, 16, 1)
        self.front("post", "q", "send", 1, "m", 0, 16, 0, 0)
        packet = self.peer.receive()
        self.send(roce.bth(roce.ACKNOWLEDGE, self.front.qpns["q"], packet.psn) + roce.aeth(roce.ACK, 1))
        self.assertEqual(self.front.status("q"), SUCCESS)


class AnotherUserInFront(WithHome):
    """Another user holds the standard port. Packets that it claims to forward are not believed."""

    def setUp(self):
        if os.geteuid() != 0:
            self.skipTest("needs root, to be another user")
        address = fresh_address()
        with as_another_user():
            self.stranger = roce.Peer(address)
        self.addCleanup(self.stranger.close)
        self.home = self.start(address)
        self.assertEqual(self.home.stat()["slot"], 1)
        self.connect_home()

    def test_he_is_not_believed(self):
        self.send(self.wrap(self.request(16)), peer=self.stranger, port=roce.PORT + 1)
        self.assertIsNone(self.peer.receive(0.3))
        self.send(self.request(16), port=roce.PORT + 1)
        self.assertEqual(self.peer.receive().psn, PSN)
