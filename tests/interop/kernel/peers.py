"""Shared by the tests of this directory: an end on Terrace on this side, and an end on rxe in the guest."""

import collections
import itertools
import time
import unittest

import capture
import cases
import guest as machine
import roce
from harness.endpoint import ALL, SUCCESS, Commands, Endpoint, connect

RawPeer = roce.Peer

# One guest for all tests; guests.py starts it.
guest = None
# Number of repetitions of programs, by cause.
repetitions = collections.Counter()

_numbers = itertools.cycle(machine.HOST_NUMBERS)

FAMILIES = (4, 6)
BIND = 16  # the access flag of regions that windows may be bound to


def fresh_address(family=4):
    """An address of this side that no program uses."""
    number = next(_numbers)
    return machine.host_ipv4(number) if family == 4 else machine.host_ipv6(number)


def guest_address(family):
    return machine.IPV4 if family == 4 else machine.IPV6


class GuestEndpoint(Commands):
    """An `endpoint` in the guest, on rxe."""

    def __init__(self, family=4):
        self._session = guest.start("exec endpoint")
        address = guest_address(family)
        super().__init__(address, self._session.socket.fileno(), self._session.socket.fileno())

    def path_words(self, _peer_address):
        return [f"gid={guest.gid_indexes[self.address]}"]

    def stop(self):
        self._session.close()


class KernelPeer(unittest.TestCase):
    """A test case that stops its ends, and in which every packet must have a correct ICRC."""

    maxDiff = None

    def setUp(self):
        # Cleanups run last in, first out: this one runs when both ends have stopped.
        self.addCleanup(self._check_icrcs)

    def _check_icrcs(self):
        wrong = [packet for packet in capture.packets(guest.capture) if not packet.icrc_is_right]
        self.assertEqual(wrong, [], "packets with a wrong ICRC")

    def host(self, family=4, *options):
        """Starts an end on this side with its device open."""
        end = Endpoint(fresh_address(family), *options)
        self.addCleanup(self._stop_host, end)
        end("open")
        return end

    def _stop_host(self, end):
        try:
            if end.process.poll() is None:
                self.assertEqual(end.stat()["port"]["bad_icrc"], 0, "ICRCs that Terrace found wrong")
        finally:
            end.stop()

    def peer(self, family=4):
        """Starts an end in the guest with its device open."""
        end = GuestEndpoint(family)
        self.addCleanup(end.stop)
        end("open")
        return end

    def pair(self, family=4, service="rc", size=1 << 20, **attributes):
        """An end on each side with a region "m" and a queue pair "q", connected. Returns both, and the regions' keys."""
        host, peer = self.host(family), self.peer(family)
        regions = [end.mr("m", "anon", size, ALL | BIND) for end in (host, peer)]
        self.join(host, peer, "q", service, **attributes)
        return host, peer, *regions

    def join(self, left, right, name, service="rc", **attributes):
        """Creates a queue pair with this name at each end, and connects them."""
        for end in (left, right):
            end.qp(name, service)
        connect(left, name, right, name, **attributes)

    def repeated(self, run, cause_of):
        """The last outcome of `run`: see `cases.repeated`. Each repetition is printed and counted."""
        outcome, causes = cases.repeated(run, cause_of)
        for cause in causes:
            print(f"(once more: {cause}) ", end="", flush=True)
            repetitions[cause] += 1
        return outcome

    def expect(self, end, name, status=SUCCESS, what="completion"):
        """The next completion, which must have this status."""
        completions = end.completions(name)
        self.assertEqual(len(completions), 1, f"{what}: none came")
        self.assertEqual(completions[0][1], status, what)
        return completions[0]

    def eventually(self, condition, what, timeout_s=10.0):
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                self.fail(f"{what}: not within {timeout_s} s")
            time.sleep(0.02)

    def check_content(self, end, offset, size, seed, **options):
        """The memory of region "m" holds the bytes of this seed."""
        words = [f"{name}={value}" for name, value in options.items()]
        self.assertEqual(end("check", "m", offset, size, seed, *words), {"differ": 0}, f"{size} bytes at {offset}")
