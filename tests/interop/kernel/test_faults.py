"""Each side answers invalid requests of the other as in the standard: NAKs, RNR waits, and the resulting statuses."""

import contextlib

import peers
from harness.endpoint import (ALL, ERR, LOC_LEN_ERR, LOC_PROT_ERR, LOC_QP_OP_ERR, REM_ACCESS_ERR, REM_INV_REQ_ERR, REM_OP_ERR,
                              REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE, RETRY_EXC_ERR, RNR_RETRY_EXC_ERR, RTS, SUCCESS,
                              WR_FLUSH_ERR, Endpoint)
from peers import FAMILIES, KernelPeer

SIZE = 1 << 16
RIGHTS = {"write": REMOTE_WRITE, "read": REMOTE_READ, "add": REMOTE_ATOMIC, "cas": REMOTE_ATOMIC}
FOR_EVER = 7  # infinite RNR retries
# Retry count and timeout exponent (4.096 us * 2^exponent) of requests to an absent peer.
SHORT = {"retry": 1, "timeout": 10}


class Faults(KernelPeer):
    def each_way(self, body):
        """Calls `body` with each side as the requester, and the region of the other."""
        for family in FAMILIES:
            host, peer = self.host(family), self.peer(family)
            host_region, peer_region = (end.mr("m", "anon", SIZE) for end in (host, peer))
            for requester, responder, region in ((host, peer, peer_region), (peer, host, host_region)):
                with self.subTest(family=family, requester="Terrace" if requester is host else "rxe"):
                    body(requester, responder, region)

    @contextlib.contextmanager
    def connection(self, requester, responder, service="rc", **attributes):
        """A connection for one invalid request, which ends it."""
        self.join(requester, responder, "q", service, **attributes)
        try:
            yield
        finally:
            for end in (requester, responder):
                end("destroy", "q")
                del end.qpns["q"]

    def refused(self, requester, responder, status, op, length, va, rkey):
        """The request ends with that status, later requests are not executed, and the responder's memory is
        unchanged."""
        responder("fill", "m", 0, SIZE, 5)
        with self.connection(requester, responder):
            requester("post", "q", op, 1, "m", 0, length, va, rkey)
            requester("post", "q", "send", 2, "m", 0, 8, 0, 0)
            self.assertEqual(requester.poll("q", 2), [(1, status), (2, WR_FLUSH_ERR)], f"{op} of {length} bytes")
            self.assertEqual(requester("state", "q"), {"state": ERR})
        self.check_content(responder, 0, SIZE, 5)

    def test_access(self):
        """Unknown keys, ranges beyond the region, and missing access rights."""
        def body(requester, responder, region):
            va, rkey = region["addr"], region["rkey"]
            for op, right in RIGHTS.items():
                length = 8 if right == REMOTE_ATOMIC else 3000
                weak = responder("submr", "weak", "m", 0, SIZE, ALL & ~right)
                outside = (va + SIZE - length + 8, va - 8, va + SIZE, (1 << 64) - 8)
                keys = (rkey ^ 0x550000, rkey ^ 1, 0, weak["rkey"])
                for wrong in (*((va, key) for key in keys), *((at, rkey) for at in outside)):
                    self.refused(requester, responder, REM_ACCESS_ERR, op, length, *wrong)
                responder("dereg", "weak")
            gone = responder("submr", "gone", "m", 0, SIZE, ALL)
            responder("dereg", "gone")
            self.refused(requester, responder, REM_ACCESS_ERR, "write", 3000, va, gone["rkey"])

        self.each_way(body)

    def test_misaligned_atomics(self):
        def body(requester, responder, region):
            if not isinstance(requester, Endpoint):
                return  # rxe rejects such a request, so it never leaves the guest
            for op in ("add", "cas"):
                self.refused(requester, responder, REM_INV_REQ_ERR, op, 8, region["addr"] + 4, region["rkey"])

        self.each_way(body)

    def test_rights_of_the_queue_pair(self):
        """A WRITE to a writable region over a queue pair without remote write access."""
        def body(requester, responder, region):
            for op, right in RIGHTS.items():
                with self.connection(requester, responder, access=ALL & ~right):
                    requester("post", "q", op, 1, "m", 0, 8, region["addr"], region["rkey"])
                    self.expect(requester, "q", REM_INV_REQ_ERR, op)

        self.each_way(body)

    def test_receives_that_are_too_short(self):
        def body(requester, responder, _region):
            own, peers = LOC_LEN_ERR, REM_INV_REQ_ERR
            if not isinstance(responder, Endpoint):
                # rxe finds the error during the copy, where it no longer distinguishes a wrong length.
                own, peers = LOC_QP_OP_ERR, REM_OP_ERR
            for length, room in ((100, 99), (5000, 4999), (5000, 100), (1, 0)):
                with self.connection(requester, responder):
                    responder("recv", "q", 2, "m", 0, room)
                    requester("post", "q", "send", 1, "m", 0, length, 0, 0)
                    self.expect(requester, "q", peers, f"send of {length} bytes")
                    self.expect(responder, "q", own, f"receive of {length} bytes")

        self.each_way(body)

    def test_receives_of_unmapped_memory(self):
        def body(requester, responder, _region):
            with self.connection(requester, responder):
                responder("submr", "gone", "m", 0, SIZE, ALL)
                responder("recv", "q", 2, "gone", 0, 1000)
                responder("dereg", "gone")
                requester("post", "q", "send", 1, "m", 0, 1000, 0, 0)
                self.expect(requester, "q", REM_OP_ERR, "send")
                ((_, status),) = responder.poll("q")
                self.assertNotEqual(status, SUCCESS)
                if isinstance(responder, Endpoint):
                    self.assertEqual(status, LOC_PROT_ERR)

        self.each_way(body)

    def test_memory_that_is_unmapped(self):
        """Access to memory that the process on Terrace has unmapped gets a NAK, and the process continues."""
        host, peer = self.host(), self.peer()
        region, _ = (end.mr("m", "anon", SIZE) for end in (host, peer))
        host("unmap", "m", 0, 8192)
        for op, offset, status in (("read", 4096, REM_ACCESS_ERR), ("write", 4096, REM_ACCESS_ERR), ("write", 8192, SUCCESS)):
            with self.connection(host, peer):
                peer("post", "q", op, 1, "m", 0, 4096, region["addr"] + offset, region["rkey"])
                self.expect(peer, "q", status, op)

    def test_receiver_not_ready(self):
        """A message, and all requests behind it, wait until a receive is posted."""
        def body(requester, responder, region):
            before = peers.guest.counters()
            with self.connection(requester, responder, rnr=FOR_EVER):
                requester("fill", "m", 0, 6000, 7)
                responder("fill", "m", 0, SIZE, 0)
                requester("post", "q", "send", 1, "m", 0, 3000, 0, 0)
                requester("post", "q", "write", 2, "m", 3000, 3000, region["addr"] + 3000, region["rkey"])
                self.assertEqual(requester.poll("q", 1, timeout_s=0.1), [])
                self.check_content(responder, 0, SIZE, 0)
                responder("recv", "q", 3, "m", 0, 3000)
                self.assertEqual(requester.poll("q", 2), [(1, SUCCESS), (2, SUCCESS)])
                self.expect(responder, "q")
                self.check_content(responder, 0, 6000, 7)
                host = requester if isinstance(requester, Endpoint) else responder
                naks = "rnr_naks_received" if host is requester else "rnr_naks_sent"
                self.assertGreater(host.counts("q")[naks], 0)
            counter = "send_rnr_err" if host is requester else "rcvd_rnr_err"
            self.assertGreater(peers.guest.counters()[counter], before[counter])

        self.each_way(body)

    def test_receiver_that_is_never_ready(self):
        def body(requester, responder, _region):
            with self.connection(requester, responder, rnr=1):
                requester("post", "q", "send", 1, "m", 0, 100, 0, 0)
                self.expect(requester, "q", RNR_RETRY_EXC_ERR, "send")
                self.assertEqual(responder("state", "q"), {"state": RTS})

        self.each_way(body)

    def test_absent_peer(self):
        def body(requester, responder, region):
            with self.connection(requester, responder, **SHORT):
                responder("destroy", "q")
                requester("post", "q", "write", 1, "m", 0, 100, region["addr"], region["rkey"])
                self.expect(requester, "q", RETRY_EXC_ERR, "write")
                responder.qp("q")

        self.each_way(body)

    def test_unreliable_writes_are_dropped(self):
        """A bad request on UC affects only that request."""
        def body(requester, responder, region):
            with self.connection(requester, responder, "uc"):
                responder("fill", "m", 0, SIZE, 0)
                requester("fill", "m", 0, 3000, 7)
                requester("post", "q", "write", 1, "m", 0, 3000, region["addr"], region["rkey"] ^ 0x550000)
                requester("post", "q", "write", 2, "m", 0, 3000, region["addr"], region["rkey"])
                self.assertEqual(requester.poll("q", 2), [(1, SUCCESS), (2, SUCCESS)])
                self.eventually(lambda: responder("check", "m", 0, 3000, 7) == {"differ": 0}, "the valid WRITE arrives")

        self.each_way(body)

    def test_datagrams_with_a_wrong_key_are_dropped(self):
        def body(requester, responder, _region):
            with self.connection(requester, responder, "ud"):
                responder("recv", "q", 3, "m", 0, 4096)
                requester("post", "q", "send", 1, "m", 0, 10, 0, 0, "qkey=0x1234")
                requester("post", "q", "send", 2, "m", 0, 20, 0, 0)
                self.assertEqual(requester.poll("q", 2), [(1, SUCCESS), (2, SUCCESS)])
                received = self.expect(responder, "q")
                self.assertEqual(received[3], 40 + 20)

        self.each_way(body)
