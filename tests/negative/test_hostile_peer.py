"""A hostile peer. It can only break its own connection: memory without permission stays unchanged,
another connection continues with correct data, and `terrace stat` counts the dropped packets."""

import os
import random
import signal
import time
import unittest

import roce
from support import (ALL, ERR, LOCAL_WRITE, REMOTE_READ, RETRY_EXC_ERR, RNR_RETRY_EXC_ERR, RTS, SUCCESS, NegativeTest, connect,
                     fresh_address)

PSN = 0x0FFFFF
SIZE = 65536
MTU = 1024  # of the connections
RANDOM = random.Random(8)


class HostilePeer(NegativeTest):
    """A victim with a connection to a hostile peer and, unless `honest_peer` is false, one to an honest peer that streams
    continuously."""

    honest_peer = True

    def setUp(self):
        self.victim = self.start()
        self.region = self.victim.mr("m", "anon", SIZE)
        self.victim.mr("secret", "anon", SIZE, LOCAL_WRITE)
        for name in ("m", "secret"):
            self.victim("fill", name, 0, SIZE, 1)
        self.peer = roce.Peer(fresh_address())
        self.addCleanup(self.peer.close)
        self.connect_hostile_peer()
        if self.honest_peer:
            self.honest = self.start()
            self.honest.mr("s", "anon", 2 << 14)
            shared = self.victim.mr("shared", "anon", 2 << 14)
            connect(self.honest, "h", self.victim, "h")
            self.stream = ("stream", "h", "s", shared["addr"], shared["rkey"])
            self.honest(*self.stream)

    def tearDown(self):
        """The victim still runs, its memory is unchanged, and the honest peer had no error."""
        for name in ("m", "secret"):
            self.assertEqual(self.victim("check", name, 0, SIZE, 1)["differ"], 0, f"{name} has changed")
        if self.honest_peer:
            self.eventually(lambda: self.honest_rounds() > 3, "the honest peer goes on", timeout_s=20)
            self.assertEqual(self.victim("state", "h")["state"], RTS)

    def honest_rounds(self):
        """The rounds of the honest peer since the last call."""
        time.sleep(0.1)
        result = self.honest("stop", "h")
        self.assertEqual((result["wrong"], result["status"]), (0, SUCCESS))
        self.honest(*self.stream)
        return result["rounds"]

    def connect_hostile_peer(self, **attributes):
        if "q" in self.victim.qpns:
            self.victim("destroy", "q")
        self.qpn = self.victim.qp("q")
        options = [f"{name}={value}" for name, value in dict(rq_psn=PSN, sq_psn=PSN, **attributes).items()]
        self.victim("connect", "q", self.peer.address, self.peer.qpn, *options)

    def send(self, opcode, *parts, psn=PSN, peer=None, icrc_error=0, **fields):
        """Sends one packet to the victim's queue pair, acknowledgement requested."""
        header = roce.bth(opcode, fields.pop("qpn", self.qpn), psn, ack=fields.pop("ack", True), **fields)
        (peer or self.peer).packet(self.victim.address, header, *parts, icrc_error=icrc_error)

    def expect_nak(self, syndrome, psn=PSN):
        answer = self.peer.receive()
        self.assertIsNotNone(answer, "no answer")
        self.assertEqual((answer.opcode, hex(answer.syndrome), answer.psn), (roce.ACKNOWLEDGE, hex(syndrome), psn))

    def expect_no_answer(self):
        self.assertIsNone(self.peer.receive(0.1))

    def expect_usable(self, psn=PSN):
        """The connection still answers a READ."""
        self.send(roce.READ_REQUEST, roce.reth(self.region["addr"], self.region["rkey"], 16), psn=psn)
        answer = self.peer.receive()
        self.assertEqual((answer.opcode, answer.psn, len(answer.body)), (roce.RESPONSE_ONLY, psn & roce.PSN_MASK, 4 + 16))

    def dropped(self):
        return self.victim.stat()["dropped"]

    def port(self):
        return self.victim.stat()["port"]

    def write(self, length=8, va=None, rkey=None):
        """A RETH, by default of a WRITE within the region."""
        return roce.reth(self.region["addr"] if va is None else va, self.region["rkey"] if rkey is None else rkey, length)


class Requests(HostilePeer):
    def test_future_psn_is_nakked_once_and_not_executed(self):
        for ahead in (1, 5, 1000, 0x7FFFFF):
            self.send(roce.WRITE_ONLY, self.write(), b"x" * 8, psn=PSN + ahead)
            if ahead == 1:
                self.expect_nak(roce.NAK_SEQUENCE)
            else:
                self.expect_no_answer()
        self.expect_usable()

    def test_past_psn_is_acknowledged_and_not_executed(self):
        self.expect_usable()
        for behind in (1, 2, 1000, 0x7FFFFF):
            self.send(roce.WRITE_ONLY, self.write(), b"x" * 8, psn=PSN + 1 - behind)
            self.peer.drain()
        self.expect_usable(PSN + 1)
        self.assertGreater(self.victim.counts("q")["duplicates"], 0)

    def test_forged_keys(self):
        """Keys close to the valid one and far from it, random keys, and the key of a region without remote write access."""
        secret = self.victim("mr", "readable", "anon", 4096, REMOTE_READ)
        keys = [self.region["rkey"] ^ 1 << bit for bit in range(32)] + [0, 0xFFFFFFFF, secret["rkey"]]
        keys += [RANDOM.getrandbits(32) for _ in range(8)]
        for rkey in keys:
            self.send(roce.WRITE_ONLY, self.write(rkey=rkey), b"x" * 8)
            self.expect_nak(roce.NAK_ACCESS)
            self.assertEqual(self.victim("state", "q")["state"], ERR)
            self.connect_hostile_peer()
        for opcode, body in ((roce.READ_REQUEST, self.write(rkey=1)), (roce.FETCH_ADD, roce.atomic_eth(self.region["addr"], 1, 1))):
            self.send(opcode, body)
            self.expect_nak(roce.NAK_ACCESS)
            self.connect_hostile_peer()

    def test_ranges_outside_of_the_region(self):
        start, end, top = self.region["addr"], self.region["addr"] + SIZE, (1 << 64) - 1
        for va, length in ((start - 1, 8), (end - 7, 8), (end, 1), (top - 7, 8), (top, 8), (0, 8), (start, SIZE + 1),
                           (start, 0x80000000), (start + 1, 0xFFFFFFFF), (end - 1, 0xFFFFFFFF)):
            self.send(roce.READ_REQUEST, self.write(length, va))
            answer = self.peer.receive()
            self.assertIn(answer.syndrome, (roce.NAK_ACCESS, roce.NAK_REQUEST), hex(length))
            self.connect_hostile_peer()
            payload = b"x" * min(length, MTU)
            self.send(roce.WRITE_ONLY if length <= MTU else roce.WRITE_FIRST, self.write(length, va),
                     payload + bytes(-len(payload) % 4), pad=-len(payload) % 4)
            answer = self.peer.receive()
            self.assertIn(answer.syndrome, (roce.NAK_ACCESS, roce.NAK_REQUEST), hex(length))
            self.connect_hostile_peer()

    def test_lengths_that_do_not_match(self):
        """The RETH's length and the payload's differ. Nothing is written outside the range of the RETH."""
        cases = [(roce.WRITE_ONLY, 16, 8), (roce.WRITE_ONLY, 8, 16), (roce.WRITE_ONLY, 0, 8), (roce.WRITE_ONLY, 2048, 2048),
                 (roce.WRITE_FIRST, 4096, 8), (roce.WRITE_FIRST, 8, 8), (roce.WRITE_FIRST, 4096, 2048)]
        self.victim("fill", "m", 0, SIZE, 1)
        for opcode, announced, carried in cases:
            self.send(opcode, self.write(announced), b"x" * carried)
            answer = self.peer.receive()
            self.assertEqual((opcode, hex(answer.syndrome)), (opcode, hex(roce.NAK_REQUEST)))
            self.connect_hostile_peer()
        # The WRITE has more packets than its RETH announces.
        self.send(roce.WRITE_FIRST, self.write(2 * MTU), b"x" * MTU)
        self.send(roce.WRITE_MIDDLE, b"x" * MTU, psn=PSN + 1)
        self.send(roce.WRITE_LAST, b"x" * MTU, psn=PSN + 2)
        self.assertIn(roce.NAK_REQUEST, [packet.syndrome for packet in self.peer.drain()])
        # Only the range of the RETH may have changed.
        self.assertEqual(self.victim("check", "m", 2 * MTU, SIZE - 2 * MTU, 1)["differ"], 0)
        self.victim("fill", "m", 0, SIZE, 1)
        self.connect_hostile_peer()

    def test_sends_too_long_for_the_receive(self):
        self.victim.mr("small", "anon", 4096)
        self.victim("recv", "q", 1, "small", 0, 64)
        self.send(roce.SEND_ONLY, b"x" * 128)
        self.expect_nak(roce.NAK_REQUEST)
        ((number, status),) = self.victim.poll("q")
        self.assertEqual((number, status != SUCCESS), (1, True))

    def test_packets_out_of_order(self):
        for opcode in (roce.SEND_MIDDLE, roce.SEND_LAST, roce.WRITE_MIDDLE, roce.WRITE_LAST):
            self.send(opcode, b"x" * (MTU if opcode in (roce.SEND_MIDDLE, roce.WRITE_MIDDLE) else 8))
            self.expect_nak(roce.NAK_REQUEST)
            self.connect_hostile_peer()

    def test_more_reads_than_max_dest_rd_atomic(self):
        """200 READs arrive while the victim is stopped. It receives them in bursts. At most 16 (max_dest_rd_atomic) may be
        pending, and one more breaks the connection."""
        os.kill(self.victim.pid, signal.SIGSTOP)
        for number in range(200):
            self.send(roce.READ_REQUEST, self.write(SIZE), psn=PSN + number * (SIZE // MTU))
        os.kill(self.victim.pid, signal.SIGCONT)
        packets, naks, limit = [], [], time.monotonic() + 10
        while not naks and time.monotonic() < limit:
            packets += self.peer.drain()
            naks = [packet for packet in packets if packet.opcode == roce.ACKNOWLEDGE]
        self.assertEqual([hex(nak.syndrome) for nak in naks], [hex(roce.NAK_REQUEST)])
        self.assertLess(len(packets) - len(naks), 64 * SIZE // MTU)
        self.assertEqual(self.victim("state", "q")["state"], ERR)

    def test_misaligned_atomics(self):
        for offset in (1, 4, 7):
            self.send(roce.FETCH_ADD, roce.atomic_eth(self.region["addr"] + offset, self.region["rkey"], 1))
            self.expect_nak(roce.NAK_REQUEST)
            self.connect_hostile_peer()


class OtherPeers(HostilePeer):
    """Packets from other peers, or for other queue pairs."""

    def test_foreign_source_address(self):
        other_peer = roce.Peer(fresh_address())
        self.addCleanup(other_peer.close)
        before = self.victim.counts("q")["dropped"]
        for _ in range(20):
            self.send(roce.WRITE_ONLY, self.write(), b"x" * 8, peer=other_peer)
            self.send(roce.ACKNOWLEDGE, roce.aeth(roce.NAK_ACCESS), peer=other_peer)
            self.send(roce.CNP, bytes(16), peer=other_peer, becn=True, ack=False)
        self.assertIsNone(other_peer.receive(0.1), "another peer got an answer")
        self.expect_no_answer()
        self.expect_usable()
        self.assertEqual(self.victim.counts("q")["dropped"] - before, 60)

    def test_the_honest_connection_drops_packets_of_the_hostile_peer(self):
        qpn = self.victim.qpns["h"]
        before = self.victim.counts("h")["dropped"]
        for psn in range(0, 1 << 24, 1 << 18):
            self.send(roce.WRITE_ONLY, self.write(), b"x" * 8, qpn=qpn, psn=psn)
            self.send(roce.ACKNOWLEDGE, roce.aeth(roce.NAK_OPERATION), qpn=qpn, psn=psn)
            self.send(roce.CNP, bytes(16), qpn=qpn, psn=psn, becn=True)
        self.eventually(lambda: self.victim.counts("h")["dropped"] == before + 3 * 64, "all packets are counted")

    def test_unknown_queue_pairs(self):
        before = self.dropped()["unknown_qp"]
        # Queue pair 1 exists: the management queue pair.
        numbers = [0, 2, 3, self.qpn ^ 0x100, self.qpn ^ 1 << 15]
        for qpn in numbers:
            self.send(roce.SEND_ONLY, b"x" * 8, qpn=qpn)
        # The number has another instance index than this port: it may belong to another process, so the packet is
        # forwarded.
        body = roce.bth(roce.SEND_ONLY, self.qpn ^ 1 << 16, PSN) + b"x" * 8
        to = (self.victim.address, roce.PORT + (self.qpn >> 16))
        self.peer.raw(body + roce.icrc(self.peer.socket.getsockname(), to, body), *to)
        self.eventually(lambda: self.dropped()["unknown_qp"] == before + len(numbers), "the packets are counted")
        self.eventually(lambda: self.victim.stat()["passed_on"] == 1, "the packet is counted")
        self.expect_no_answer()

    def test_other_services_and_partitions(self):
        before, partition_before = self.victim.counts("q")["dropped"], self.dropped()["wrong_partition"]
        self.send(roce.UD_SEND_ONLY, roce.deth(0x11111111, 7), b"x" * 8)
        self.send(0x20 + roce.SEND_ONLY, b"x" * 8)  # unreliable connection
        self.send(roce.WRITE_ONLY, self.write(), b"x" * 8, pkey=0x1234)
        self.eventually(lambda: self.victim.counts("q")["dropped"] == before + 2, "the packets are counted")
        self.assertEqual(self.dropped()["wrong_partition"], partition_before + 1)
        self.expect_no_answer()
        self.expect_usable()

    def test_datagrams_with_a_wrong_key(self):
        qpn = self.victim.qp("u", "ud")
        self.victim("connect", "u", self.peer.address, 0)
        self.victim.mr("d", "anon", 4096)
        self.victim("recv", "u", 1, "d", 0, 256)
        self.send(roce.UD_SEND_ONLY, roce.deth(0x11111112, 7), b"x" * 8, qpn=qpn)
        self.send(roce.UD_SEND_ONLY, roce.deth(0x11111111, 7), b"x" * 512, qpn=qpn)  # correct key, too long
        self.assertEqual(self.victim.poll("u", 1, 0.1), [])
        self.send(roce.UD_SEND_ONLY, roce.deth(0x11111111, 7), b"x" * 8, qpn=qpn)
        self.assertEqual(self.victim.poll("u"), [(1, SUCCESS)])


class MalformedPackets(HostilePeer):
    """Malformed packets."""

    def test_wrong_icrc(self):
        before = self.port()["bad_icrc"]
        for icrc_error in (1, 0x80, 0xFF):
            self.send(roce.WRITE_ONLY, self.write(), b"x" * 8, icrc_error=icrc_error)
        self.eventually(lambda: self.port()["bad_icrc"] == before + 3, "the packets are counted")
        self.expect_no_answer()
        self.expect_usable()

    def test_unknown_opcodes_versions_and_pads(self):
        before, dropped_before = self.dropped()["malformed"], self.victim.counts("q")["dropped"]
        known = [*range(0x15), 0x16, 0x17, 0x1C, 0x1D, *range(0x20, 0x2C), roce.UD_SEND_ONLY, 0x65, roce.CNP, *range(0xA0, 0xB8), 0xC0, 0xC1, 0xC2, 0xC4, 0xD0, 0xD1]
        unknown = [opcode for opcode in range(256) if opcode not in known]
        for opcode in unknown:
            self.send(opcode, self.write(), b"x" * 8)
        for version in range(1, 16):
            self.send(roce.WRITE_ONLY, self.write(), b"x" * 8, version=version)
        for pad in (1, 2, 3):
            self.send(roce.SEND_ONLY, b"", pad=pad)
        count = len(unknown) + 15 + 3
        self.eventually(lambda: self.dropped()["malformed"] == before + count, "the packets are counted")
        self.assertEqual(self.victim.counts("q")["dropped"], dropped_before)
        self.expect_no_answer()
        self.expect_usable()

    def test_truncated_headers(self):
        """Several opcodes, truncated after each byte, with a correct ICRC and without."""
        whole = self.write() + bytes(32)
        to = (self.victim.address, roce.PORT + (self.qpn >> 16))
        needed = {roce.WRITE_ONLY: 28, roce.READ_REQUEST: 28, roce.FETCH_ADD: 40, roce.ACKNOWLEDGE: 16, roce.RESPONSE_ONLY: 16,
                  roce.SEND_ONLY_IMM: 16, roce.ATOMIC_ACKNOWLEDGE: 24, roce.CNP: 28}
        port, dropped = self.port(), self.dropped()
        sent_before = self.peer.sent
        for opcode, least in needed.items():
            for length in range(least):
                body = (roce.bth(opcode, self.qpn, PSN) + whole)[:length]
                self.peer.raw(body, *to)
                if length >= 5:
                    self.peer.raw(body + roce.icrc(self.peer.socket.getsockname(), to, body), *to)
        sent = self.peer.sent - sent_before

        def counted():
            now_port, now_dropped = self.port(), self.dropped()
            return (sum(now_port[name] - port[name] for name in ("bad_icrc", "truncated"))
                    + now_dropped["malformed"] - dropped["malformed"])

        self.eventually(lambda: counted() == sent, f"all {sent} are counted")
        self.expect_no_answer()
        self.expect_usable()

    def test_flood_of_random_bytes(self):
        to = (self.victim.address, roce.PORT + (self.qpn >> 16))
        for number in range(20_000):
            self.peer.raw(RANDOM.randbytes(RANDOM.randrange(1, 200)), *to)
        # Packets with correct ICRCs and queue pair numbers pass more of the checks.
        for number in range(5_000):
            header = bytearray(roce.bth(RANDOM.randrange(256), self.qpn, PSN + RANDOM.randrange(-20, 20)))
            header[1] = RANDOM.randrange(256) & 0xF0
            self.peer.packet(self.victim.address, bytes(header), RANDOM.randbytes(4 * RANDOM.randrange(0, 60)))
        # The victim may still receive the packets.
        while self.peer.receive(0.3) is not None:
            pass
        self.connect_hostile_peer()
        self.expect_usable()

    def test_datagrams_of_maximum_length(self):
        to = (self.victim.address, roce.PORT + (self.qpn >> 16))
        for length in (4096 + 64, 9000, 65000):
            self.send(roce.SEND_ONLY, bytes(length))
            self.peer.raw(RANDOM.randbytes(length), *to)
        self.peer.drain()
        self.connect_hostile_peer()
        self.expect_usable()


class InvalidResponses(HostilePeer):
    """The victim sends requests, and the hostile peer's responses are invalid."""

    def post(self, operation="write", size=64, **attributes):
        self.connect_hostile_peer(**attributes)
        self.victim("post", "q", operation, 5, "m" if operation != "read" else "target", 0, size, 0x1000, 0x42)
        request = self.peer.receive()
        self.assertEqual(request.psn, PSN)

    def setUp(self):
        super().setUp()
        self.victim.mr("target", "anon", SIZE)
        self.victim("fill", "target", 0, SIZE, 2)

    def expect_target(self, first_unchanged):
        self.assertEqual(self.victim("check", "target", first_unchanged, SIZE - first_unchanged, 2)["differ"], 0)

    def expect_outstanding(self):
        self.assertEqual(self.victim.poll("q", 1, 0.05), [])
        self.assertEqual(self.victim("state", "q")["state"], RTS)

    def test_acknowledgements_of_unsent_packets(self):
        for psn in (PSN + 1, PSN + 1000, PSN - 1, PSN + 0x7FFFFF):
            self.send(roce.ACKNOWLEDGE, roce.aeth(roce.ACK), psn=psn)
        self.post(timeout=17)
        for psn in (PSN + 1, PSN + 1000, PSN - 1, PSN + 0x7FFFFF):
            self.send(roce.ACKNOWLEDGE, roce.aeth(roce.ACK), psn=psn)
            self.send(roce.ACKNOWLEDGE, roce.aeth(roce.NAK_ACCESS), psn=psn)
        self.expect_outstanding()
        self.send(roce.ACKNOWLEDGE, roce.aeth(roce.ACK))
        self.assertEqual(self.victim.poll("q"), [(5, SUCCESS)])

    def test_reserved_syndromes(self):
        """A reserved syndrome may end the request in error or be ignored. The request ends at the latest when its retries
        are exhausted."""
        for syndrome in (*range(0x65, 0x80), 0x40, 0x5F, 0x80, 0xFF):
            self.post(timeout=8, retry=0)
            self.send(roce.ACKNOWLEDGE, roce.aeth(syndrome))
            ((number, status),) = self.victim.poll("q")
            self.assertEqual((number, status == SUCCESS and syndrome & 0x60 != 0), (5, False), hex(syndrome))
            self.peer.drain()

    def test_endless_rnr_naks(self):
        self.post(rnr=3, timeout=17)
        for _ in range(4):
            self.send(roce.ACKNOWLEDGE, roce.aeth(roce.RNR_NAK | 1))
            self.peer.receive(0.5)
        self.assertEqual(self.victim.poll("q"), [(5, RNR_RETRY_EXC_ERR)])

    def test_endless_sequence_naks(self):
        """Sequence NAKs cause retransmissions up to the retry count."""
        self.post(retry=3, timeout=10)
        for _ in range(20):
            self.send(roce.ACKNOWLEDGE, roce.aeth(roce.NAK_SEQUENCE))
            if self.peer.receive(0.2) is None:
                break
        self.assertEqual(self.victim.poll("q"), [(5, RETRY_EXC_ERR)])

    def test_read_response_longer_than_requested(self):
        for length in (8, 60, 68, 128, MTU):
            self.post("read", 64, timeout=10, retry=1)
            self.send(roce.RESPONSE_ONLY, roce.aeth(roce.ACK), b"x" * length)
            ((number, status),) = self.victim.poll("q")
            self.assertEqual((number, status == SUCCESS), (5, False), length)
            self.expect_target(64)
            self.peer.drain()

    def test_read_answered_by_other_packets(self):
        answers = [(roce.RESPONSE_FIRST, roce.aeth(roce.ACK) + b"x" * MTU), (roce.RESPONSE_MIDDLE, b"x" * MTU),
                   (roce.RESPONSE_LAST, roce.aeth(roce.ACK) + b"x" * 8), (roce.ATOMIC_ACKNOWLEDGE, roce.aeth(roce.ACK) + bytes(8)),
                   (roce.ACKNOWLEDGE, roce.aeth(roce.ACK)), (roce.RESPONSE_ONLY, roce.aeth(roce.NAK_ACCESS) + b"x" * 64)]
        for opcode, body in answers:
            self.post("read", 64, timeout=8, retry=1)
            self.send(opcode, body)
            ((number, status),) = self.victim.poll("q")
            self.assertEqual((number, status == SUCCESS), (5, False), opcode)
            self.expect_target(64)
            self.peer.drain()

    def test_unsolicited_responses(self):
        for opcode in (roce.RESPONSE_FIRST, roce.RESPONSE_ONLY, roce.RESPONSE_LAST, roce.ATOMIC_ACKNOWLEDGE):
            self.send(opcode, roce.aeth(roce.ACK), b"x" * 8)
        self.post(timeout=17)
        for opcode in (roce.RESPONSE_ONLY, roce.ATOMIC_ACKNOWLEDGE):
            self.send(opcode, roce.aeth(roce.ACK), b"x" * 8, psn=PSN + 1)
        self.expect_outstanding()
        self.send(roce.ACKNOWLEDGE, roce.aeth(roce.ACK))
        self.assertEqual(self.victim.poll("q"), [(5, SUCCESS)])
        self.expect_target(0)

    def test_flood_of_congestion_notifications(self):
        for _ in range(10_000):
            self.send(roce.CNP, bytes(16), becn=True, ack=False)
        self.eventually(lambda: self.victim.counts("q")["cnps_received"] > 1000, "the packets are counted")
        self.post("write", 64)
        self.send(roce.ACKNOWLEDGE, roce.aeth(roce.ACK))
        self.assertEqual(self.victim.poll("q"), [(5, SUCCESS)])


class Throughput(HostilePeer):
    def test_the_honest_connection_continues_under_a_flood(self):
        """The flood uses a part of two processors; the connection must keep a twentieth of its rate."""
        time.sleep(0.5)
        undisturbed = self.honest("stop", "h")["rounds"] / 0.5
        shared = self.victim.mr("again", "anon", 2 << 14)
        self.honest("stream", "h", "s", shared["addr"], shared["rkey"])
        started = time.monotonic()
        while time.monotonic() - started < 1.0:
            for _ in range(200):
                self.send(RANDOM.choice((roce.WRITE_ONLY, roce.ACKNOWLEDGE, roce.READ_REQUEST, 0xEE)), self.write(), b"x" * 8,
                         psn=PSN + RANDOM.randrange(2, 50), icrc_error=RANDOM.choice((0, 0, 1)))
        seconds = time.monotonic() - started
        result = self.honest("stop", "h")
        self.assertEqual((result["wrong"], result["status"]), (0, SUCCESS))
        self.assertGreater(result["rounds"] / seconds, undisturbed / 20)
        self.peer.drain()
        self.honest("stream", "h", "s", shared["addr"], shared["rkey"])


if __name__ == "__main__":
    unittest.main()
