"""Each verb with Terrace as requester and as responder. Every byte is checked at the other side."""

import itertools
import socket

import capture
import peers
from harness.endpoint import ALL, REM_ACCESS_ERR, connect
from peers import FAMILIES, KernelPeer

# Path MTU in bytes, and as `enum ibv_mtu` has it.
MTUS = {1024: 3, 4096: 5}
SOURCE, TARGET = 0, 512 << 10
MARGIN = 64
IMMEDIATE = 0x12345678
# ibv_wc_flags and ibv_wc_opcode.
WITH_GRH, WITH_IMM, WITH_INV = 1, 2, 8
RECV, RECV_WITH_IMM = 128, 129
# rxe sets the kernel's flag of that meaning, which has another value.
WITH_INV_OF_RXE = 4
GRH_BYTES = 40
MASK_64 = (1 << 64) - 1

_seeds = itertools.count(1)


def lengths(mtu_bytes):
    """Lengths of messages: empty, one packet, two, and many."""
    return [0, 1, mtu_bytes - 1, mtu_bytes, mtu_bytes + 1, 3 * mtu_bytes + 5, 200_000]


class Verbs(KernelPeer):
    """Helpers for the tests of all services."""

    def each_way(self, service, body):
        """Calls `body` with a connection for each address family and MTU, and each side as the requester."""
        for family, (mtu_bytes, mtu) in itertools.product(FAMILIES, MTUS.items()):
            host, peer, host_region, peer_region = self.pair(family, service, mtu=mtu)
            for requester, responder, region in ((host, peer, peer_region), (peer, host, host_region)):
                with self.subTest(family=family, mtu=mtu_bytes, requester="Terrace" if requester is host else "rxe"):
                    body(requester, responder, region, mtu_bytes)

    def move(self, requester, responder, region, op, length):
        """Moves one message from one memory to the other. Returns the completion of the receive, if there is one."""
        seed = next(_seeds)
        giver, taker = (responder, requester) if op == "read" else (requester, responder)
        giver("fill", "m", SOURCE, length, seed, "from=0")
        taker("fill", "m", TARGET, length + MARGIN, 0)
        receives = op not in ("write", "read")
        if receives:
            responder("recv", "q", 2, "m", TARGET, length)
        local, remote = (TARGET, SOURCE) if op == "read" else (SOURCE, TARGET)
        requester("post", "q", op, 1, "m", local, length, region["addr"] + remote, region["rkey"], f"imm={IMMEDIATE}")
        what = f"{op} of {length} bytes"
        self.expect(requester, "q", what=what)
        received = self.expect(responder, "q", what=f"receive of {what}") if receives else None
        if op == "write" and responder.services["q"] == "uc":
            self.eventually(lambda: taker("check", "m", TARGET, length, seed, "from=0") == {"differ": 0}, what)
        self.check_content(taker, TARGET, length, seed, **{"from": 0})
        self.check_content(taker, TARGET + length, MARGIN, 0)
        return received

    def moves(self, service, ops):
        def body(requester, responder, region, mtu_bytes):
            for op, length in itertools.product(ops, lengths(mtu_bytes)):
                received = self.move(requester, responder, region, op, length)
                if received is None:
                    continue
                _, _, opcode, byte_count, flags, immediate, _ = received
                self.assertEqual(byte_count, length)
                self.assertEqual(opcode, RECV_WITH_IMM if op == "write_imm" else RECV)
                self.assertEqual(flags & WITH_IMM != 0, op.endswith("_imm"), op)
                if op.endswith("_imm"):
                    self.assertEqual(immediate, IMMEDIATE)

        self.each_way(service, body)


class Reliable(Verbs):
    def test_sends(self):
        self.moves("rc", ["send", "send_imm"])

    def test_writes(self):
        self.moves("rc", ["write", "write_imm"])

    def test_reads(self):
        self.moves("rc", ["read"])

    def test_many_at_once(self):
        """More requests of every kind outstanding at once than the window holds."""
        def body(requester, responder, region, _mtu_bytes):
            count, length, seed = 32, 9000, next(_seeds)
            for end in (requester, responder):
                end("fill", "m", SOURCE, count * length, seed)
                end("fill", "m", TARGET, count * length, 0)
            for index in range(count):
                at = index * length
                op = ("write", "read")[index % 2]
                local, remote = (SOURCE, TARGET) if op == "write" else (TARGET, SOURCE)
                requester("post", "q", op, index, "m", local + at, length, region["addr"] + remote + at, region["rkey"])
            completions = requester.poll("q", count)
            self.assertEqual(completions, [(index, 0) for index in range(count)])
            for index in range(count):
                taker = (responder, requester)[index % 2]
                self.check_content(taker, TARGET + index * length, length, seed, **{"from": index * length})

        self.each_way("rc", body)

    def test_atomics(self):
        def body(requester, responder, region, _mtu_bytes):
            where = (region["addr"], region["rkey"])
            responder("word", "m", 0, MASK_64 - 1)
            for before, add in ((MASK_64 - 1, 5), (3, 1 << 40), (3 + (1 << 40), 0)):
                requester("post", "q", "add", 1, "m", 64, 8, *where, f"add={add}")
                self.expect(requester, "q", what="fetch and add")
                self.assertEqual(requester("word", "m", 64), {"value": before})
            now = 3 + (1 << 40)
            for compare, swap, after in ((now, 77, 77), (now, 88, 77), (77, MASK_64, MASK_64)):
                before = responder("word", "m", 0)
                requester("post", "q", "cas", 1, "m", 64, 8, *where, f"compare={compare}", f"swap={swap}")
                self.expect(requester, "q", what="compare and swap")
                self.assertEqual(requester("word", "m", 64), before)
                self.assertEqual(responder("word", "m", 0), {"value": after})

        self.each_way("rc", body)

    def test_many_atomics(self):
        """All atomics take effect once, in order."""
        def body(requester, responder, region, _mtu_bytes):
            responder("word", "m", 0, 0)
            for index in range(100):
                requester("post", "q", "add", index, "m", 64 + 8 * index, 8, region["addr"], region["rkey"], "add=1")
            self.assertEqual(requester.poll("q", 100), [(index, 0) for index in range(100)])
            values = [requester("word", "m", 64 + 8 * index)["value"] for index in range(100)]
            self.assertEqual(values, list(range(100)))
            self.assertEqual(responder("word", "m", 0), {"value": 100})

        self.each_way("rc", body)

    def test_send_with_invalidate(self):
        """The window's key is invalid before the receive completes."""
        def body(requester, responder, region, _mtu_bytes):
            responder("mw", "w")
            key = responder("bind", "q", 5, "w", "m", TARGET, 4096, ALL & ~1)["rkey"]
            self.expect(responder, "q", what="bind")
            requester("fill", "m", SOURCE, 4096, 9, "from=0")
            requester("post", "q", "write", 1, "m", SOURCE, 4096, region["addr"] + TARGET, key)
            self.expect(requester, "q", what="write by the window's key")
            self.check_content(responder, TARGET, 4096, 9, **{"from": 0})
            responder("recv", "q", 2, "m", TARGET + 8192, 100)
            requester("post", "q", "send_inv", 1, "m", SOURCE, 100, 0, 0, f"inv={key}")
            self.expect(requester, "q", what="send with invalidate")
            received = self.expect(responder, "q", what="receive")
            self.assertEqual((received[3], received[5]), (100, key))
            self.assertTrue(received[4] & (WITH_INV_OF_RXE if isinstance(responder, peers.GuestEndpoint) else WITH_INV))
            requester("post", "q", "write", 1, "m", SOURCE, 4096, region["addr"] + TARGET, key)
            self.expect(requester, "q", REM_ACCESS_ERR, "write by an invalidated key")
            # The failed access ended this connection, so the other direction needs a new one.
            for end in (requester, responder):
                end("destroy", "q")
                end.qp("q")
            connect(requester, "q", responder, "q")

        self.each_way("rc", body)


class Unreliable(Verbs):
    def test_sends(self):
        self.moves("uc", ["send", "send_imm"])

    def test_writes(self):
        self.moves("uc", ["write", "write_imm"])


class Datagrams(Verbs):
    def test_sends(self):
        def body(requester, responder, _region, mtu_bytes):
            for op, length in itertools.product(("send", "send_imm"), (0, 1, 100, mtu_bytes - 1, mtu_bytes)):
                seed = next(_seeds)
                requester("fill", "m", SOURCE, length, seed, "from=0")
                responder("fill", "m", TARGET, GRH_BYTES + length + MARGIN, 0)
                responder("recv", "q", 2, "m", TARGET, GRH_BYTES + length)
                requester("post", "q", op, 1, "m", SOURCE, length, 0, 0, f"imm={IMMEDIATE}")
                self.expect(requester, "q", what=op)
                _, _, _, byte_count, flags, immediate, source = self.expect(responder, "q", what=f"receive of {op}")
                self.assertEqual((byte_count, source), (GRH_BYTES + length, requester.qpns["q"]))
                self.assertEqual(flags & WITH_GRH, WITH_GRH)
                if op == "send_imm":
                    self.assertEqual((flags & WITH_IMM, immediate), (WITH_IMM, IMMEDIATE))
                self.check_content(responder, TARGET + GRH_BYTES, length, seed, **{"from": 0})
                self.check_content(responder, TARGET + GRH_BYTES + length, MARGIN, 0)
                self.assertEqual(self.header_addresses(responder), (requester.address, responder.address))

        self.each_way("ud", body)

    def header_addresses(self, responder):
        """Source and destination in the header before the data: IPv4 in its last 20 bytes, or IPv6."""
        header = bytes.fromhex(responder("hex", "m", TARGET, GRH_BYTES)[0])
        if header[20] >> 4 == 4:
            return socket.inet_ntoa(header[32:36]), socket.inet_ntoa(header[36:40])
        return tuple(socket.inet_ntop(socket.AF_INET6, header[at:at + 16]) for at in (8, 24))


class Checksums(KernelPeer):
    """rxe silently drops packets with a wrong ICRC, so its counters are compared with the packets on the wire."""

    def setUp(self):
        """Omits the ICRC check of the other tests, because some ICRCs are wrong."""

    def to_and_from_guest(self, peer):
        """The number of packets in each direction."""
        own = socket.inet_aton(peer.address)
        packets = list(capture.packets(peers.guest.capture))
        return sum(packet.destination == own for packet in packets), sum(packet.source == own for packet in packets)

    def test_packets_with_correct_icrc_are_counted(self):
        before = peers.guest.counters()
        host, peer, host_region, peer_region = self.pair()
        for requester, region in ((host, peer_region), (peer, host_region)):
            for op in ("write", "read"):
                requester("post", "q", op, 1, "m", 0, 300_000, region["addr"], region["rkey"])
                self.expect(requester, "q", what=op)
        to_guest, from_guest = self.to_and_from_guest(peer)
        after, port = peers.guest.counters(), host.stat()["port"]
        self.assertGreater(min(to_guest, from_guest), 500)
        self.assertEqual(after["rcvd_pkts"] - before["rcvd_pkts"], to_guest)
        self.assertEqual((port["rx_packets"], port["bad_icrc"]), (from_guest, 0))

    def test_packets_with_wrong_icrc_are_not_counted(self):
        peer, sender = self.peer(), peers.RawPeer(peers.fresh_address())
        self.addCleanup(sender.close)
        qpn, before = peer.qp("q"), peers.guest.counters()
        peer("connect", "q", sender.address, sender.qpn, *peer.path_words(sender.address))
        for icrc_error in (1, 0):
            sender.packet(peer.address, peers.roce.bth(peers.roce.SEND_ONLY, qpn, 0), b"data", icrc_error=icrc_error)
        self.eventually(lambda: self.to_and_from_guest(peer)[0] == 2, "two packets were sent")
        self.assertEqual(peers.guest.counters()["rcvd_pkts"] - before["rcvd_pkts"], 1)
        self.assertEqual([packet.icrc_is_right for packet in capture.packets(peers.guest.capture)][:2], [False, True])
