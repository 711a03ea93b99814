"""`tc netem` drops one packet in fifty in each direction: no message is lost, executed twice or out of order."""

import itertools
import json
import random

import peers
from guest import MTU
from harness.endpoint import SUCCESS
from peers import FAMILIES, KernelPeer

LOSS_PERCENT = 2
# Only UDP passes netem, so the command channel has no loss.
UDP_FILTERS = ("protocol ip prio 1 u32 match ip protocol 17 0xff", "protocol ipv6 prio 2 u32 match ip6 protocol 17 0xff")
MODULES = ("sch_netem", "sch_prio", "sch_ingress", "cls_u32", "act_mirred", "ifb")

BATCHES, DEPTH = 20, 16
LENGTH_MAX = 20_000
HALF = 512 << 10  # of a region: one half for outgoing data, one for incoming data


class Loss(KernelPeer):
    def setUp(self):
        super().setUp()
        self.addCleanup(peers.guest.try_run,
                        "/bin/tc qdisc del dev eth0 root; /bin/tc qdisc del dev eth0 ingress; /bin/ip link del ifb9")
        self._lose_packets()
        self.random = random.Random(self.id())
        self.addCleanup(self._check_losses, self._lost())

    @staticmethod
    def _lose_packets():
        """Both directions lose packets in the guest: netem is a part of Debian's kernel, but not of every host's."""
        guest = peers.guest
        guest.modprobe(*MODULES)
        guest.run("/bin/tc qdisc add dev eth0 root handle 1: prio bands 3 priomap 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0")
        guest.run(f"/bin/tc qdisc add dev eth0 parent 1:3 handle 30: netem loss {LOSS_PERCENT}% limit 10000")
        guest.run(f"/bin/ip link add ifb9 type ifb && /bin/ip link set ifb9 mtu {MTU} up")
        guest.run(f"/bin/tc qdisc add dev ifb9 root handle 40: netem loss {LOSS_PERCENT}% limit 10000")
        guest.run("/bin/tc qdisc add dev eth0 handle ffff: ingress")
        for filter_words in UDP_FILTERS:
            guest.run(f"/bin/tc filter add dev eth0 parent 1: {filter_words} flowid 1:3")
            guest.run(f"/bin/tc filter add dev eth0 parent ffff: {filter_words} action mirred egress redirect dev ifb9")

    def _lost(self):
        """Packets lost so far on their way from the guest and to it."""
        shown = json.loads(peers.guest.run("/bin/tc -s -j qdisc show"))
        return tuple(sum(entry["drops"] for entry in shown if entry["handle"] == handle) for handle in ("30:", "40:"))

    def _check_losses(self, before):
        lost = [now - then for now, then in zip(self._lost(), before)]
        self.assertGreater(min(lost), 0, "packets were lost in each direction")

    def each_way(self, body):
        for family, requester in itertools.product(FAMILIES, ("Terrace", "rxe")):
            host, peer, host_region, peer_region = self.pair(family, mtu=3)
            with self.subTest(family=family, requester=requester):
                if requester == "Terrace":
                    body(host, peer, peer_region)
                    self.assertGreater(host.counts("q")["retransmits"], 0)
                else:
                    body(peer, host, host_region)
                    counts = host.counts("q")
                    self.assertGreater(counts["sequence_naks_sent"] + counts["duplicates"], 0)

    def test_messages(self):
        """Messages of every kind, several outstanding at once."""
        def body(requester, responder, region):
            for batch in range(BATCHES):
                self.batch(requester, responder, region, batch + 1)

        self.each_way(body)

    def batch(self, requester, responder, region, seed):
        ops = [self.random.choice(("send", "send_imm", "write", "write_imm", "read")) for _ in range(DEPTH)]
        lengths = [self.random.randrange(1, LENGTH_MAX) for _ in range(DEPTH)]
        for end in (requester, responder):
            end("fill", "m", 0, HALF, seed)
            end("fill", "m", HALF, HALF, 0)
        receives = 0
        for index, (op, length) in enumerate(zip(ops, lengths)):
            at = index * LENGTH_MAX
            local, remote = (HALF, 0) if op == "read" else (0, HALF)
            if op not in ("write", "read"):
                responder("recv", "q", index, "m", HALF + at if op != "write_imm" else 0, length)
                receives += 1
            requester("post", "q", op, index, "m", local + at, length, region["addr"] + remote + at, region["rkey"])
        self.assertEqual(requester.poll("q", DEPTH), [(index, SUCCESS) for index in range(DEPTH)], ops)
        received = responder.poll("q", receives)
        self.assertEqual(received, [(index, SUCCESS) for index in range(DEPTH) if ops[index] not in ("write", "read")], ops)
        for index, (op, length) in enumerate(zip(ops, lengths)):
            taker, at = requester if op == "read" else responder, index * LENGTH_MAX
            self.check_content(taker, HALF + at, length, seed, **{"from": at})
            self.check_content(taker, HALF + at + length, LENGTH_MAX - length, 0)

    def test_atomics(self):
        """Each atomic is executed once, also when its packets are retransmitted."""
        def body(requester, responder, region):
            count = 300
            responder("word", "m", 0, 0)
            for first in range(0, count, 100):
                for index in range(first, first + 100):
                    requester("post", "q", "add", index, "m", 64 + 8 * index, 8, region["addr"], region["rkey"], "add=1")
                self.assertEqual(requester.poll("q", 100), [(index, SUCCESS) for index in range(first, first + 100)])
            values = [requester("word", "m", 64 + 8 * index)["value"] for index in range(count)]
            self.assertEqual(values, list(range(count)))
            self.assertEqual(responder("word", "m", 0), {"value": count})

        self.each_way(body)

    def test_both_directions_concurrently(self):
        """Requests, data and acknowledgements of both sides on one connection."""
        for family in FAMILIES:
            host, peer, host_region, peer_region = self.pair(family, mtu=3)
            host("stream", "q", "m", peer_region["addr"] + HALF, peer_region["rkey"])
            peer("stream", "q", "m", host_region["addr"] + HALF, host_region["rkey"])
            self.eventually(lambda: host.counts("q")["retransmits"] > 20, "packets are retransmitted")
            for end in (host, peer):
                outcome = end("stop", "q")
                self.assertEqual((outcome["wrong"], outcome["status"]), (0, SUCCESS), outcome)
                self.assertGreater(outcome["rounds"], 0)
