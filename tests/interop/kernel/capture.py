"""Reads a capture of the wire (pcap, Ethernet): every RoCEv2 packet, and whether its invariant CRC is correct."""

import struct
from dataclasses import dataclass

import roce

ETHERNET_BYTES, UDP_BYTES, ICRC_BYTES = 14, 8, 4
IPV4, IPV6, UDP = 0x0800, 0x86DD, 17
# The RoCEv2 port, and the ports of Terrace's other instance indexes.
ROCE_PORTS = range(roce.PORT, roce.PORT + 256)


@dataclass
class Packet:
    """A RoCEv2 packet."""

    source: bytes  # addresses as they are in the header
    destination: bytes
    opcode: int
    qpn: int
    psn: int
    icrc_is_right: bool
    syndrome: int = 0  # of an ACKNOWLEDGE


def packets(path):
    """The RoCEv2 packets of a capture, in their order."""
    with open(path, "rb") as file:
        content = file.read()
    if len(content) < 24:
        return
    endian = "<" if content[:4] == b"\xd4\xc3\xb2\xa1" else ">"
    at = 24
    # The last packet may be incomplete, because it is still being written.
    while at + 16 <= len(content):
        _, _, length, _ = struct.unpack_from(endian + "IIII", content, at)
        frame = content[at + 16:at + 16 + length]
        at += 16 + length
        packet = _roce(frame)
        if packet is not None:
            yield packet


def _roce(frame):
    kind, ip = int.from_bytes(frame[12:14], "big"), frame[ETHERNET_BYTES:]
    if kind == IPV4 and ip[9] == UDP:
        header_bytes, addresses = (ip[0] & 15) * 4, (ip[12:16], ip[16:20])
        ip = ip[:int.from_bytes(ip[2:4], "big")]
    elif kind == IPV6 and ip[6] == UDP:
        header_bytes, addresses = 40, (ip[8:24], ip[24:40])
        ip = ip[:40 + int.from_bytes(ip[4:6], "big")]
    else:
        return None
    header, udp, rest = ip[:header_bytes], ip[header_bytes:header_bytes + UDP_BYTES], ip[header_bytes + UDP_BYTES:]
    if int.from_bytes(udp[2:4], "big") not in ROCE_PORTS or len(rest) < 12 + ICRC_BYTES:
        return None
    body, crc = rest[:-ICRC_BYTES], rest[-ICRC_BYTES:]
    opcode, _, _, qpn, psn = struct.unpack("!BBHII", body[:12])
    syndrome = body[12] if opcode == roce.ACKNOWLEDGE and len(body) > 12 else 0
    return Packet(*addresses, opcode, qpn & 0xFFFFFF, psn & 0xFFFFFF, roce.icrc_of(header, udp, body) == crc, syndrome)


def all_acknowledged(path, requester, responder):
    """Whether the responder has sent an ACK of the requester's last SEND or WRITE to each of its queue pairs. The addresses are as
    they are in the header."""
    last, acknowledged = {}, set()
    for packet in packets(path):
        if (packet.source, packet.destination) == (requester, responder) and packet.opcode < roce.READ_REQUEST:
            if packet.psn - last.setdefault(packet.qpn, packet.psn) & roce.PSN_MASK < 1 << 23:
                last[packet.qpn] = packet.psn
        elif (packet.source, packet.destination) == (responder, requester) and packet.opcode == roce.ACKNOWLEDGE:
            # The upper bits tell ACKs from NAKs.
            if packet.syndrome >> 5 == 0 and packet.icrc_is_right:
                acknowledged.add(packet.psn)
    return bool(last) and acknowledged.issuperset(last.values())
