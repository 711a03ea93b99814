"""A peer is killed in the middle of traffic: the survivor gets an error within the time of its attributes, and
continues."""

import time
import unittest

import roce
from support import (ERR, REM_ACCESS_ERR, RETRY_EXC_ERR, RTS, SUCCESS, WR_FLUSH_ERR, NegativeTest, connect, fresh_address)

SIZE = 65536


def timeout_s(exponent):
    """A local ACK timeout (IBTA volume 1, 9.7.6.1.3)."""
    return 4.096e-6 * 2**exponent


class Vanishing(NegativeTest):
    def test_outstanding_requests_end_in_time(self):
        """The timeout is between the exponent's value and four times that (9.7.6.1.3). Each retry adds a timeout."""
        exponent, retries = 13, 3  # 34 ms
        client, server, _, region = self.pair(timeout=exponent, retry=retries)
        client("post", "q", "write", 0, "m", 0, SIZE, region["addr"], region["rkey"])
        self.assertEqual(client.status("q"), SUCCESS)
        server.kill()
        started = time.monotonic()
        for number in range(1, 9):
            client("post", "q", "read" if number % 2 else "write", number, "m", 0, SIZE, region["addr"], region["rkey"])
        completions = client.poll("q", 8)
        seconds = time.monotonic() - started
        self.assertEqual(completions, [(1, RETRY_EXC_ERR)] + [(number, WR_FLUSH_ERR) for number in range(2, 9)])
        least = (retries + 1) * timeout_s(exponent)
        self.assertGreaterEqual(seconds, least * 0.95)
        self.assertLess(seconds, 4 * least + 0.5)
        self.assertEqual(client("state", "q")["state"], ERR)
        # A new post is flushed immediately.
        client("post", "q", "write", 9, "m", 0, 8, region["addr"], region["rkey"])
        self.assertEqual(client.poll("q"), [(9, WR_FLUSH_ERR)])
        # The process reaches another peer with another queue pair.
        other = self.start()
        region = other.mr("m", "anon", SIZE)
        connect(client, "again", other, "again")
        client("post", "again", "read", 10, "m", 0, SIZE, region["addr"], region["rkey"])
        self.assertEqual(client.poll("again"), [(10, SUCCESS)])

    def test_in_the_middle_of_traffic(self):
        """Both ends stream when one is killed. The stream of a third process to the survivor continues."""
        survivor, victim, region, _ = self.pair(timeout=12, retry=2)
        witness = self.start()
        witness.mr("s", "anon", 2 << 14)
        connect(witness, "w", survivor, "w")
        shared = survivor.mr("shared", "anon", 2 << 14)
        witness("stream", "w", "s", shared["addr"], shared["rkey"])
        survivor.mr("s", "anon", 2 << 14)
        victim.mr("s", "anon", 2 << 14)
        target = victim.mr("target", "anon", SIZE)
        victim("stream", "q", "s", region["addr"], region["rkey"])
        connect(survivor, "p", victim, "p", timeout=12, retry=2)
        survivor("stream", "p", "s", target["addr"], target["rkey"])
        time.sleep(0.2)
        victim.kill()
        time.sleep(0.5)
        result = survivor("stop", "p")
        self.assertEqual((result["wrong"], result["status"]), (0, RETRY_EXC_ERR))
        self.assertGreater(result["rounds"], 0)
        # A queue pair that is only a responder gets no error.
        self.assertEqual(survivor("state", "q")["state"], RTS)
        result = witness("stop", "w")
        self.assertEqual((result["wrong"], result["status"]), (0, SUCCESS))

    def test_a_sleeping_survivor_is_woken(self):
        """The survivor does not poll; the completion event wakes it."""
        client, server, _, region = self.pair(timeout=10, retry=2)
        server.kill()
        client("arm", "q")
        client("post", "q", "write", 1, "m", 0, 8, region["addr"], region["rkey"])
        client("wait", "q", 5)
        self.assertEqual(client.poll("q"), [(1, RETRY_EXC_ERR)])

    def test_a_restarted_peer_is_not_mistaken_for_the_killed_one(self):
        """The new process has the killed one's instance index, and so its UDP port. Its queue pairs have other numbers, and
        its regions other keys, so old connections do not reach it."""
        client, first, _, region = self.pair(timeout=12, retry=4)
        first("fill", "m", 0, SIZE, 1)
        address, qpn, slot = first.address, first.qpns["q"], first.stat()["slot"]
        first.kill()
        client("post", "q", "write", 1, "m", 0, SIZE, region["addr"], region["rkey"])

        second = self.start(address)
        new_region = second.mr("m", "anon", SIZE)
        second("fill", "m", 0, SIZE, 2)
        self.assertEqual(second.stat()["slot"], slot)
        connect(client, "new", second, "new")
        self.assertNotEqual(second.qpns["new"], qpn)
        self.assertNotEqual(new_region["rkey"], region["rkey"])
        # The old connection's packets find no queue pair, and are counted.
        self.assertEqual(client.poll("q"), [(1, RETRY_EXC_ERR)])
        self.assertGreater(second.stat()["dropped"]["unknown_qp"], 0)
        self.assertEqual(second("check", "m", 0, SIZE, 2)["differ"], 0)
        # The old key gives no access to the new region.
        client("post", "new", "read", 2, "m", 0, 8, new_region["addr"], new_region["rkey"])
        self.assertEqual(client.poll("new"), [(2, SUCCESS)])
        client("post", "new", "write", 3, "m", 0, 8, new_region["addr"], region["rkey"])
        self.assertEqual(client.poll("new"), [(3, REM_ACCESS_ERR)])

    def test_numbers_and_keys_of_processes_differ(self):
        """Of a dozen processes with one instance index, no two have both the same first queue pair number and the same first
        key."""
        address, seen = fresh_address(), []
        for _ in range(12):
            end = self.start(address)
            seen.append((end.qp("q"), end.mr("m", "anon", 4096)["rkey"]))
            end.kill()
        self.assertGreaterEqual(len({qpn for qpn, _ in seen}), 11)
        self.assertGreaterEqual(len({rkey for _, rkey in seen}), 11)
        self.assertEqual(len(set(seen)), 12)

    def test_an_address_without_a_process(self):
        """The error is the same as for a vanished peer. The kernel's ICMP errors do not change it."""
        client = self.start()
        client.mr("m", "anon", SIZE)
        client.qp("q")
        client("connect", "q", fresh_address(), 0x1234, "timeout=10", "retry=1")
        client("post", "q", "send", 1, "m", 0, SIZE, 0, 0)
        self.assertEqual(client.poll("q"), [(1, RETRY_EXC_ERR)])

    def test_a_peer_that_never_answers(self):
        """A peer that never answers: the unacknowledged data stays within the window."""
        client, peer = self.start(), roce.Peer(fresh_address())
        self.addCleanup(peer.close)
        client.mr("m", "anon", 4 << 20)
        client.qp("q")
        client("connect", "q", peer.address, peer.qpn, "timeout=12", "retry=1")
        for number in range(64):
            client("post", "q", "write", number, "m", 0, 4 << 20, 0x1000, 1)
        self.assertEqual(client.poll("q"), [(0, RETRY_EXC_ERR)])
        self.assertLess(client.counts("q")["tx_bytes"], 4 << 20)

    def test_receives_of_a_dead_connection(self):
        """A connection that only receives does not learn that its peer is dead. Its receives are flushed when the
        program moves it to the error state."""
        left, right, *_ = self.pair(timeout=10, retry=1)
        for number in range(4):
            left("recv", "q", number, "m", 0, 64)
        right.kill()
        self.assertEqual(left.poll("q", 1, 0.05), [])
        left("error", "q")
        self.assertEqual(left.poll("q", 4), [(number, WR_FLUSH_ERR) for number in range(4)])
        left("destroy", "q")


if __name__ == "__main__":
    unittest.main()
