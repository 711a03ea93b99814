"""Attacks by hostile peers. Each attack is a function that runs in a separate process for a limited time, and
reports how many packets it sent. It uses only what an attacker of its kind can know. Only `replay` needs a
privilege."""

import contextlib
import errno
import itertools
import os
import random
import socket
import struct
import time
from dataclasses import dataclass, field

import control
import roce
from control import NoAnswer, ControlClient, message

BATCH = 64  # packets between two reads of the clock
PREPARED = 4000  # different packets, sent repeatedly
MTU = 1024
CM_CLASS = 0x07
DESCRIBE = 1


@dataclass
class Targets:
    """The targets of the attacks, and the facts about them that an attacker can learn."""

    node: str  # address of a memory node
    program: str  # address of a verbs program
    listener: str  # address of a program that takes connections by rdma_cm
    bystanders: list  # (address, peer's address, peer's queue pair) of the bystanders' connections
    bystander_psn: int  # their initial PSN
    region: str  # name of the node's region
    attackers: list = field(default_factory=list)  # the attackers' addresses
    opened: dict = field(default_factory=dict)  # queue pairs that the program has opened to attackers, by address


class TimeOver(Exception):
    """The attack's time is over."""


class Clock:
    def __init__(self, seconds):
        self.deadline = time.monotonic() + seconds

    def check(self):
        if time.monotonic() >= self.deadline:
            raise TimeOver

    def left(self):
        return self.deadline - time.monotonic()


@contextlib.contextmanager
def peer_at(address, instance=0):
    peer = roce.Peer(address, instance << 16 | 0x123)
    try:
        yield peer
    finally:
        peer.close()


def sealed(source, to, body):
    return body + roce.icrc(source, (to, roce.PORT), body)


def flood(peer, datagrams, clock):
    """Sends (datagram, address) pairs at full speed, without reading replies."""
    send, cycle = peer.socket.sendto, itertools.cycle(datagrams)
    while True:
        clock.check()
        for datagram, address in itertools.islice(cycle, BATCH):
            with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                send(datagram, (address, roce.PORT))
        peer.sent += BATCH


def spoofed(address, rng):
    """A sender with a spoofed address: on the loopback any process may bind any address."""
    return peer_at(address, instance=rng.randrange(64, 128))


# ---- off-path: no connection, sees no packets ------------------------------------------------------------------------------


def malformed_packets(targets, clock, sent):
    """Malformed packets: random bytes, truncated and oversized packets, wrong ICRCs, unknown opcodes."""
    rng = random.Random(1)
    with peer_at(targets.attackers[0]) as peer:
        source, datagrams = peer.socket.getsockname(), []
        for number in range(PREPARED):
            to = (targets.node, targets.program)[number % 2]
            body = roce.bth(rng.randrange(256), rng.randrange(1 << 16), rng.randrange(1 << 24)) + rng.randbytes(4 * rng.randrange(20))
            kind = rng.randrange(6)
            if kind == 0:
                datagram = rng.randbytes(rng.randrange(0, 200))
            elif kind == 1:
                datagram = sealed(source, to, body)[:rng.randrange(0, 24)]
            elif kind == 2 and number % 64 < 2:
                datagram = rng.randbytes(rng.choice((9000, 65000)))
            elif kind == 3:
                datagram = body + rng.randbytes(4)
            elif kind == 4:
                datagram = sealed(source, to, body[:1] + bytes([rng.randrange(256)]) + body[2:])
            else:
                datagram = sealed(source, to, body)
            datagrams.append((datagram, to))
        with sent(peer):
            flood(peer, datagrams, clock)


def forged(rng, source, to, qpn, psn):
    """A packet that would change or end a connection if its queue pair, PSN and key were right."""
    wrong_rkey = roce.reth(rng.randrange(1 << 47), rng.randrange(1 << 32), 64)
    opcode, parts = rng.choice((
        (roce.WRITE_ONLY, wrong_rkey + bytes(64)), (roce.READ_REQUEST, wrong_rkey), (roce.SEND_ONLY, bytes(64)),
        (roce.ACKNOWLEDGE, roce.aeth(roce.ACK)), (roce.ACKNOWLEDGE, roce.aeth(roce.NAK_ACCESS)),
        (roce.ACKNOWLEDGE, roce.aeth(roce.NAK_SEQUENCE)), (roce.ACKNOWLEDGE, roce.aeth(roce.RNR_NAK)),
        (roce.RESPONSE_ONLY, roce.aeth(roce.ACK) + bytes(64)), (roce.COMPARE_SWAP, roce.atomic_eth(8, 1, 2)), (roce.CNP, bytes(16))))
    return sealed(source, to, roce.bth(opcode, qpn, psn, ack=opcode == roce.WRITE_ONLY, becn=opcode == roce.CNP) + parts)


def guessed_numbers(targets, clock, sent):
    """Packets with the spoofed address of a peer, and guessed queue pairs, PSNs and keys."""
    rng = random.Random(2)
    address, to, _ = targets.bystanders[0]
    with spoofed(address, rng) as peer:
        source = peer.socket.getsockname()
        datagrams = [(forged(rng, source, to, rng.randrange(2, 1 << 16), rng.randrange(1 << 24)), to) for _ in range(PREPARED * 4)]
        with sent(peer):
            flood(peer, datagrams, clock)


def known_numbers(targets, clock, sent):
    """As `guessed_numbers`, from an attacker that knows the queue pairs but not their PSNs: acknowledgements, requests and
    congestion notifications with PSNs far behind and far ahead."""
    rng = random.Random(3)
    address, to, qpn = rng.choice(targets.bystanders)
    with spoofed(address, rng) as peer:
        source, datagrams = peer.socket.getsockname(), []
        for _ in range(PREPARED):
            distance = rng.choice((-1, 1)) * rng.randrange(1 << 22, 1 << 23)
            datagrams.append((forged(rng, source, to, qpn, targets.bystander_psn + (1 << 21) + distance), to))
        with sent(peer):
            flood(peer, datagrams, clock)


def describe(tid, rkey):
    head = struct.pack(">BBBB4xQH18x4s", 1, 0x3D, control.VERSION, control.GET, tid, DESCRIBE, b"\0\x02\x54\x52")
    return (head + struct.pack("<I", rkey)).ljust(256, b"\0")


def connection_datagram(rng):
    """A MAD of the connection manager's class: a valid header, then a body of zeros with a few random bytes."""
    attribute = rng.choice((0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x19, 0x1A))
    head = struct.pack(">BBBB4xQH2xI", 1, CM_CLASS, 2, 3, rng.randrange(1 << 64), attribute, 0)
    body = bytearray(256 - len(head))
    for _ in range(rng.randrange(64)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return head + bytes(body)


def management(targets, clock, sent):
    """Queries, connection requests and other datagrams to the management queue pairs, at full speed."""
    rng = random.Random(4)
    with peer_at(targets.attackers[8]) as peer:
        source, datagrams = peer.socket.getsockname(), []
        for number in range(PREPARED):
            if number % 2:
                to, datagram = targets.listener, connection_datagram(rng)
            elif number % 4:
                to, datagram = targets.node, describe(number, rng.randrange(1 << 32))
            else:
                to, datagram = targets.node, control.connection_request(number, 0x200 + number, rng.randrange(1 << 24))
            if rng.random() < 0.05:
                datagram = rng.randbytes(256)
            header = roce.bth(roce.UD_SEND_ONLY, 1, number) + roce.deth(control.QKEY_OF_MANAGEMENT, 1)
            datagrams.append((sealed(source, to, header + datagram), to))
        with sent(peer):
            flood(peer, datagrams, clock)


def half_open(targets, clock, sent):
    """Connection requests from thousands of spoofed addresses, with no packet after them."""
    rng = random.Random(5)
    while True:
        clock.check()
        address = f"127.41.{rng.randrange(1, 200)}.{rng.randrange(1, 255)}"
        with peer_at(address) as peer, sent(peer):
            header = roce.bth(roce.UD_SEND_ONLY, 1, 0) + roce.deth(control.QKEY_OF_MANAGEMENT, 1)
            for number in range(4):
                request = control.connection_request(number, 0x200 + number, rng.randrange(1 << 24))
                peer.raw(sealed(peer.socket.getsockname(), targets.node, header + request), targets.node)


# ---- on-path: sees packets, and can send any ------------------------------------------------------------------------------


def packets_between(sniffer, addresses, clock, count=2000):
    """(source, destination, RoCE packet without ICRC) of the captured packets."""
    captured = []
    while len(captured) < count:
        clock.check()
        frame = sniffer.recv(65536)
        if len(frame) < 44 or frame[0] != 0x45 or frame[9] != socket.IPPROTO_UDP:
            continue
        source, destination = (socket.inet_ntoa(frame[at:at + 4]) for at in (12, 16))
        (port,) = struct.unpack_from("!H", frame, 22)
        # A GSO batch is captured as one frame, which is skipped.
        if {source, destination} <= addresses and port == roce.PORT and len(frame) <= 28 + 4096 + 64:
            captured.append((source, destination, frame[28:-4]))
    return captured


def replay(targets, clock, sent):
    """Replays captured packets of the bystanders' connections, three times each."""
    sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
    sniffer.bind(("lo", 0))
    addresses = {address for bystander in targets.bystanders for address in bystander[:2]}
    rng = random.Random(6)
    with contextlib.closing(sniffer), contextlib.ExitStack() as stack:
        peers = {address: stack.enter_context(spoofed(address, rng)) for address in addresses}
        for peer in peers.values():
            stack.enter_context(sent(peer))
        while True:
            for source, destination, packet in packets_between(sniffer, addresses, clock):
                peer = peers[source]
                for _ in range(3):
                    peer.raw(sealed(peer.socket.getsockname(), destination, packet), destination)


# ---- connected, to a memory node ------------------------------------------------------------------------------------------


def connections_to_node(targets, peer, qpns):
    """Connections to the node, one after the other; None if the node accepts no more."""
    while True:
        with contextlib.suppress(NoAnswer):
            yield ControlClient(peer, targets.node, next(qpns), attempts=3, psn=random.randrange(1 << 24))
            continue
        yield None


def exhaust_connections(targets, clock, sent):
    """Opens up to 150 connections and 256 queue pairs on each of 20, then sends FINDs at full speed and acknowledges no
    answer."""
    qpns = itertools.cycle(range(0x1000, 0x8000, 2))
    with peer_at(targets.attackers[1]) as peer, sent(peer):
        while True:
            owned = []
            for client in itertools.islice(connections_to_node(targets, peer, qpns), 150):
                clock.check()
                if client is None:
                    break
                with contextlib.suppress(NoAnswer):
                    client.find(targets.region)
                    owned.append(client)
            for client in owned[:20]:
                for number in range(256):
                    clock.check()
                    client.send_message(message(control.PAIR, struct.pack("<IIH", 0x10000 + number & 0xFFFF, 0, MTU)))
            question = message(control.FIND, targets.region.encode())
            for _ in range(2000):
                clock.check()
                for client in owned[:40]:
                    client.send_message(question)


def undrained_responses(targets, clock, sent):
    """READs the whole region over several connections. Answers every packet with an RNR NAK, or not at all."""
    qpns = itertools.cycle(range(0x1000, 0x8000, 4))
    with peer_at(targets.attackers[2]) as peer, sent(peer):
        while True:
            owned = {}
            for client in itertools.islice(connections_to_node(targets, peer, qpns), 6):
                clock.check()
                if client is None:
                    break
                with contextlib.suppress(NoAnswer, AssertionError):
                    rkey, va, length, region_id = client.find(targets.region)
                    client.grant(rkey, region_id)
                    owned[client.qpn] = client
                    for _ in range(60):
                        client.send_message(message(control.READ, control.read(rkey, va, length)))
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                clock.check()
                packet = peer.receive(0.05)
                if packet is None or packet.qpn not in owned:
                    continue
                if packet.qpn % 8:
                    owned[packet.qpn].acknowledge(packet.psn, roce.RNR_NAK)


def malformed_requests(targets, clock, sent):
    """Corrupted requests, most of them close to valid ones."""
    rng, qpns = random.Random(7), itertools.cycle(range(0x1000, 0x8000, 2))
    kinds = (control.OPEN, control.MAGIC, control.READ, control.WRITE, control.FIND, control.PAIR, control.DONE)
    with peer_at(targets.attackers[3]) as peer, sent(peer):
        for client in connections_to_node(targets, peer, qpns):
            clock.check()
            if client is None:
                continue
            with contextlib.suppress(NoAnswer, AssertionError):
                rkey, va, length, region_id = client.find(targets.region)
                client.grant(rkey, region_id)
                good = (control.read(rkey, va, length, page_count=length // 4096, words=[(1 << 64) - 1] * 64),
                        control.write(rkey, va + length - 8, bytes(16)), control.write_from_memory(rkey, va, 1 << 31, 0, 5),
                        control.magic(client.qpn + 1, client.server_qpn, rkey, region_id), targets.region.encode())
                for _ in range(40):
                    body = bytearray(rng.choice(good))
                    for _ in range(rng.randrange(4)):
                        body[rng.randrange(len(body))] = rng.randrange(256)
                    client.send_message(message(rng.choice(kinds), bytes(body[:rng.choice((8, 16, 40, 1000))])))


def read_everything(targets, clock, sent):
    """One-sided READs of the whole region, 64 per connection, repeatedly over batches of four connections."""
    qpns = itertools.cycle(range(0x1000, 0x8000, 2))
    with peer_at(targets.attackers[4]) as peer, sent(peer):
        while True:
            for client in itertools.islice(connections_to_node(targets, peer, qpns), 4):
                clock.check()
                if client is None:
                    continue
                with contextlib.suppress(NoAnswer, AssertionError):
                    rkey, va, length, region_id = client.find(targets.region)
                    server_qpn = client.grant(rkey, region_id)
                    for number in range(64):
                        clock.check()
                        header = roce.bth(roce.READ_REQUEST, server_qpn, number * (length // MTU), ack=True)
                        peer.packet(targets.node, header, roce.reth(va, rkey, length))
            time.sleep(min(0.3, max(clock.left(), 0)))


# ---- connected, to a verbs program ----------------------------------------------------------------------------------------


def endless_rnr_naks(targets, clock, sent):
    """Answers a program's WRITE with RNR NAKs for ever, and acknowledges PSNs that were never sent."""
    with peer_at(targets.attackers[5]) as peer, sent(peer):
        qpn, psn = targets.opened[targets.attackers[5]]
        source = peer.socket.getsockname()
        answers = [sealed(source, targets.program, roce.bth(roce.ACKNOWLEDGE, qpn, psn) + roce.aeth(roce.RNR_NAK | 1))] * 8
        for ahead in (-1, 1, 100, 1 << 22):
            header = roce.bth(roce.ACKNOWLEDGE, qpn, psn + ahead)
            answers += [sealed(source, targets.program, header + roce.aeth(syndrome)) for syndrome in (roce.ACK, roce.NAK_SEQUENCE)]
        flood(peer, [(answer, targets.program) for answer in answers], clock)


def unsolicited_packets(targets, clock, sent):
    """SENDs without a posted receive, messages that never end, and CNPs."""
    with peer_at(targets.attackers[6]) as peer, sent(peer):
        qpn, psn = targets.opened[targets.attackers[6]]
        source = peer.socket.getsockname()
        bodies = [roce.bth(roce.SEND_ONLY, qpn, psn, ack=True) + bytes(64), roce.bth(roce.SEND_FIRST, qpn, psn) + bytes(MTU),
                  roce.bth(roce.CNP, qpn, 0, becn=True) + bytes(16), roce.bth(roce.SEND_ONLY, qpn, psn + 9, ack=True) + bytes(64)]
        flood(peer, [(sealed(source, targets.program, body), targets.program) for body in bodies], clock)


ATTACKS = (
    malformed_packets, guessed_numbers, known_numbers, management, half_open, replay, exhaust_connections, undrained_responses,
    malformed_requests, read_everything, endless_rnr_naks, unsolicited_packets)


def run(attack, targets, seconds, report, niceness=0):
    """Runs an attack in this process at this niceness. Reports the number of sent packets, or the reason why it could not run."""
    total = 0
    os.nice(niceness)

    @contextlib.contextmanager
    def sent(peer):
        nonlocal total
        try:
            yield
        finally:
            total += peer.sent

    try:
        attack(targets, Clock(seconds), sent)
    except TimeOver:
        report.put(total)
    except PermissionError as error:
        report.put(f"not run: {error.strerror}")
    except OSError as error:
        # An attacker may exhaust its descriptors or ports before the end.
        report.put(f"{total} packets, then {errno.errorcode.get(error.errno, error)}")
