"""A client of a memory node that builds control messages byte by byte, valid or not, from the documentation of
`terrace_access::proto`. It shares no code with the node."""

import struct
import time

import roce

QKEY_OF_MANAGEMENT = 0x80010000
VERSION, GET, RESPONSE = 5, 0x01, 0x81
CONNECTION = 2
OPEN, OPENED, MAGIC, READ, WRITE, DONE, FIND, FOUND, PAIR, PAIRED = range(1, 11)
(OK, NO_SUCH_REGION, ACCESS_DENIED, OUT_OF_RANGE, INVALID, DEVICE_ERROR, NO_SPACE, BUSY, PLAIN, CLIENT_MEMORY,
 UNSUPPORTED) = range(11)
MTU = 1024


def message(kind, body=b"", ident=7, version=VERSION, status=0, length=None):
    """An encoded message, valid or not."""
    length = 16 + len(body) if length is None else length
    return struct.pack("<BBHIQ", version, kind, status, length, ident) + body


def read(rkey, va, length, destination=(0x1000, 0x77), page_count=0, offset=0, words=()):
    dest_va, dest_rkey = destination
    head = struct.pack("<IIQIIQH6x", rkey, length, va, dest_rkey, page_count, dest_va, offset)
    return head + b"".join(struct.pack("<Q", word) for word in words)


def write(rkey, va, data, length=None):
    return struct.pack("<IIQIB3xQ", rkey, len(data) if length is None else length, va, 0, 0, 0) + data


def write_from_memory(rkey, va, length, source_va, source_rkey):
    return struct.pack("<IIQIB3xQ", rkey, length, va, source_rkey, 1, source_va)


def magic(client_qpn, server_qpn, rkey, region_id, on=0):
    return struct.pack("<IIIB3xQ", client_qpn, server_qpn, rkey, on, region_id)


def connection_request(tid, qpn, psn, mtu=MTU):
    """A management datagram that requests a control queue pair."""
    head = struct.pack(">BBBB4xQH18x4s", 1, 0x3D, VERSION, GET, tid, CONNECTION, b"\0\x02\x54\x52")
    return (head + struct.pack("<IIHH", qpn, psn, mtu, 64)).ljust(256, b"\0")


def accepted(datagram):
    """The answer to a connection request: status, queue pair number and first PSN of the node's end."""
    qpn, psn, _, _, status = struct.unpack_from("<IIHHH", datagram, 40)
    return status, qpn, psn


def opened_message(content):
    """Kind, status, id and body of a message."""
    _, kind, status, length, ident = struct.unpack_from("<BBHIQ", content)
    return kind, status, ident, content[16:length]


def found(body):
    """The fields of a FOUND body: key, first address, length and id of the region."""
    rkey, _, _, va, length, _, region_id = struct.unpack_from("<IBI4xQQQQ", body)
    return rkey, va, length, region_id


class NoAnswer(Exception):
    """The node does not answer."""


class ControlClient:
    """One control queue pair to a node. Messages are short enough for one packet each."""

    def __init__(self, peer, server, qpn=0x0200, attempts=20, psn=0x1000):
        """The instance index in `qpn` must be that of the peer's queue pair number."""
        self.peer, self.server, self.qpn = peer, server, qpn
        self.management_qpn = peer.qpn & 0xFF0000 | 1
        self.psn = self.first_psn = psn
        self.server_qpn, self.expected_psn = self._connect(attempts)

    def _connect(self, attempts):
        for _ in range(attempts):
            self.send_connection_request()
            deadline = time.monotonic() + 0.2
            while (packet := self.peer.receive(max(deadline - time.monotonic(), 0))) is not None:
                datagram = packet.body[8:]
                if packet.opcode != roce.UD_SEND_ONLY or struct.unpack_from(">Q", datagram, 8) != (self.qpn,):
                    continue
                status, qpn, psn = accepted(datagram)
                if status == OK:
                    return qpn, psn
                break
        raise NoAnswer

    def send_connection_request(self):
        """Sends one connection request."""
        header = roce.bth(roce.UD_SEND_ONLY, 1, 0)
        datagram = connection_request(self.qpn, self.qpn, self.first_psn)
        self.peer.packet(self.server, header, roce.deth(QKEY_OF_MANAGEMENT, self.management_qpn), datagram)

    def send_message(self, data):
        """Sends bytes as one message."""
        padding = -len(data) % 4
        header = roce.bth(roce.SEND_ONLY, self.server_qpn, self.psn, ack=True, pad=padding)
        self.peer.packet(self.server, header, data, bytes(padding))
        self.psn = self.psn + 1 & roce.PSN_MASK

    def receive_packet(self, timeout_s=2.0):
        """The next packet for this queue pair that is not an ACKNOWLEDGE; a SEND is acknowledged."""
        while (packet := self.peer.receive(timeout_s)) is not None:
            if packet.qpn != self.qpn or packet.opcode == roce.ACKNOWLEDGE:
                continue
            if packet.opcode == roce.SEND_ONLY and packet.psn == self.expected_psn:
                self.acknowledge(packet.psn)
                self.expected_psn = packet.psn + 1 & roce.PSN_MASK
                return packet
            if packet.opcode != roce.SEND_ONLY:
                return packet
        raise NoAnswer

    def acknowledge(self, psn, syndrome=roce.ACK):
        self.peer.packet(self.server, roce.bth(roce.ACKNOWLEDGE, self.server_qpn, psn), roce.aeth(syndrome))

    def answer(self, timeout_s=2.0):
        """Kind, status, id and body of the next message."""
        return opened_message(self.receive_packet(timeout_s).body)

    def request(self, kind, body, timeout_s=2.0):
        """Sends a request, and returns kind, status and body of the answer."""
        self.send_message(message(kind, body))
        kind, status, ident, body = self.answer(timeout_s)
        assert ident == 7, ident
        return kind, status, body

    def find(self, name):
        """Key, first address, length and id of a region."""
        kind, _, body = self.request(FIND, name.encode())
        assert kind == FOUND, kind
        return found(body)

    def grant(self, rkey, region_id):
        """Gets access to a region: requests a queue pair, and claims it with MAGIC. Returns the node's queue pair
        number."""
        kind, _, body = self.request(PAIR, struct.pack("<IIH", self.qpn + 1, 0, MTU))
        assert kind == PAIRED, kind
        server_qpn, _, _ = struct.unpack_from("<IIH", body)
        kind, status, _ = self.request(MAGIC, magic(self.qpn + 1, server_qpn, rkey, region_id))
        assert (kind, status) == (DONE, OK), (kind, status)
        return server_qpn
