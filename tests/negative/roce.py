"""A RoCEv2 peer that sends any packet, valid or not, from a plain UDP socket.

Layouts are those of IBTA volume 1, chapter 9, and annex A17; nothing here shares code with Terrace.
"""

import contextlib
import socket
import struct
import time
import zlib
from dataclasses import dataclass

PORT = 4791
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3  # sets the identification of an unconnected socket's packets to 0
PKEY = 0xFFFF
PSN_MASK = 0xFFFFFF

# Opcodes of reliable connections.
SEND_FIRST, SEND_MIDDLE, SEND_LAST, SEND_LAST_IMM, SEND_ONLY, SEND_ONLY_IMM = range(6)
WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST, WRITE_LAST_IMM, WRITE_ONLY, WRITE_ONLY_IMM = range(6, 12)
READ_REQUEST, RESPONSE_FIRST, RESPONSE_MIDDLE, RESPONSE_LAST, RESPONSE_ONLY = range(12, 17)
ACKNOWLEDGE, ATOMIC_ACKNOWLEDGE, COMPARE_SWAP, FETCH_ADD = range(17, 21)
UD_SEND_ONLY, CNP = 0x64, 0x81

# Syndromes of an AETH.
ACK = 0x1F
RNR_NAK, NAK_SEQUENCE, NAK_REQUEST, NAK_ACCESS, NAK_OPERATION = 0x20, 0x60, 0x61, 0x62, 0x63


def bth(opcode, qpn, psn, *, ack=False, solicited=False, pad=0, version=0, pkey=PKEY, becn=False):
    """The base transport header."""
    flags = solicited << 7 | 1 << 6 | pad << 4 | version
    return struct.pack("!BBHII", opcode, flags, pkey, becn << 30 | qpn, ack << 31 | psn & PSN_MASK)


def reth(va, rkey, length):
    return struct.pack("!QII", va, rkey, length)


def aeth(syndrome, msn=0):
    return struct.pack("!I", syndrome << 24 | msn)


def atomic_eth(va, rkey, swap_or_add, compare=0):
    return struct.pack("!QIQQ", va, rkey, swap_or_add, compare)


def deth(qkey, source_qpn):
    return struct.pack("!II", qkey, source_qpn)


def icrc(source, destination, packet, identification=0):
    """The invariant CRC of a packet (BTH to pad) between two IPv4 (address, port) pairs."""
    udp_length = 8 + len(packet) + 4
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + udp_length, identification, 0x4000, 64, 17, 0,
                     socket.inet_aton(source[0]), socket.inet_aton(destination[0]))
    return icrc_of(ip, struct.pack("!HHHH", source[1], destination[1], udp_length, 0), packet)


def icrc_of(ip, udp, packet):
    """The invariant CRC of a packet (BTH to pad) with these headers: variant fields count as all ones."""
    if ip[0] >> 4 == 4:
        ip = ip[:1] + b"\xff" + ip[2:8] + b"\xff" + ip[9:10] + b"\xff\xff" + ip[12:]
    else:
        ip = b"\x6f\xff\xff\xff" + ip[4:7] + b"\xff" + ip[8:]
    covered = b"\xff" * 8 + ip + udp[:6] + b"\xff\xff" + packet[:4] + b"\xff" + packet[5:]
    return struct.pack("<I", zlib.crc32(covered))


@dataclass
class Received:
    """The fields of a received packet that tests use."""

    opcode: int
    qpn: int
    psn: int
    wants_ack: bool
    body: bytes  # after the BTH, without the ICRC

    @property
    def syndrome(self):
        return self.body[0]


class Peer:
    """One address, one socket, and a queue pair number that the test chooses."""

    def __init__(self, address, qpn=0x0123):
        self.address, self.qpn = address, qpn
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.socket.bind((address, PORT + (qpn >> 16)))
        self.sent = 0

    def close(self):
        self.socket.close()

    def raw(self, datagram, address, port=PORT):
        """Sends bytes without an ICRC."""
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
            self.socket.sendto(datagram, (address, port))
            self.sent += 1

    def packet(self, address, header, *parts, icrc_error=0):
        """Sends a packet with its ICRC, XORed with `icrc_error`. The instance index in the BTH's queue pair number selects
        the port."""
        body = header + b"".join(parts)
        to = (address, PORT + header[5])
        crc = icrc(self.socket.getsockname(), to, body)
        self.raw(body + bytes(byte ^ icrc_error for byte in crc), *to)

    def receive(self, timeout_s=2.0):
        """The next packet, whose ICRC must be correct; None on timeout."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                datagram, source = self.socket.recvfrom(65536)
            except (TimeoutError, socket.timeout):
                return None
            packet = datagram[:-4]
            # The packets of one GSO batch have consecutive IP identifications from 0.
            if all(icrc(source, self.socket.getsockname(), packet, number) != datagram[-4:] for number in range(64)):
                raise AssertionError("the packet's ICRC is wrong")
            opcode, _, _, qpn, psn = struct.unpack("!BBHII", packet[:12])
            return Received(opcode, qpn & 0xFFFFFF, psn & PSN_MASK, bool(psn >> 31), packet[12:])
        return None

    def drain(self):
        """All packets that have arrived."""
        packets = []
        while (packet := self.receive(0.02)) is not None:
            packets.append(packet)
        return packets
