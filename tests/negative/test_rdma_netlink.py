"""Netlink requests about RDMA devices: those of iproute2's `rdma`, and invalid ones."""

import errno
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import unittest

from support import NegativeTest, fresh_address, procs

NAME = "mlx5_0"

NETLINK_RDMA = 20
REQUEST, ACK, DUMP = 1, 4, 0x300
ERROR, DONE = 2, 3
NLDEV = 5 << 10
GET, SET, PORT_GET, SYS_GET, RES_GET, RES_CQ_GET, GET_CHARDEV = (NLDEV + number for number in (1, 2, 5, 6, 9, 12, 15))
DEV_INDEX, DEV_NAME, PORT_INDEX, CHARDEV_TYPE, CHARDEV_NAME = 1, 2, 3, 69, 70


def attribute(kind, value):
    value = struct.pack("=I", value) if isinstance(value, int) else value.encode() + b"\0"
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def request(kind, *attributes, flags=REQUEST | ACK, sequence=7):
    payload = b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(payload), kind, flags, sequence, 0) + payload


def answers(datagram):
    """(type, sequence, port ID, payload) of each message of a datagram."""
    while datagram:
        length, kind, _, sequence, port = struct.unpack_from("=IHHII", datagram)
        yield kind, sequence, port, datagram[16:length]
        datagram = datagram[-(-length // 4) * 4:]


def attributes(payload):
    found = {}
    while payload:
        length, kind = struct.unpack_from("=HH", payload)
        found[kind] = payload[4:length]
        payload = payload[-(-length // 4) * 4:]
    return found


def status(message):
    """The errno of an error message."""
    kind, _, _, payload = message
    assert kind == ERROR, kind
    return -struct.unpack_from("=i", payload)[0]


class Requests:
    """What the program under Terrace does: this file, run by itself."""

    def __init__(self, bind=True):
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_RDMA)
        self.socket.settimeout(5)
        if bind:
            self.socket.bind((0, 0))

    def receive(self):
        return [message for message in answers(self.socket.recv(4096))]

    def ask(self, message):
        self.socket.sendto(message, (0, 0))
        return self.receive()

    def refused(self, message):
        (answer,) = self.ask(message)
        return status(answer)

    def check_objects(self):
        """An object and an acknowledgement, for the socket's port ID."""
        for message, name in ((request(GET, attribute(DEV_INDEX, 0)), DEV_NAME),
                              (request(PORT_GET, attribute(DEV_INDEX, 0), attribute(PORT_INDEX, 1)), DEV_NAME),
                              (request(GET_CHARDEV, attribute(CHARDEV_TYPE, "rdma_cm")), CHARDEV_NAME),
                              (request(SYS_GET), None)):
            ((kind, sequence, port, payload),) = self.ask(message)
            assert (sequence, port) == (7, self.socket.getsockname()[0])
            if name is not None:
                expected = NAME if name == DEV_NAME else "rdma_cm"
                assert attributes(payload)[name] == expected.encode() + b"\0", payload
            (acknowledgement,) = self.receive()
            assert status(acknowledgement) == 0

    def check_lists(self):
        for kind in (GET, PORT_GET, RES_GET):
            ((got, _, _, payload),) = self.ask(request(kind, flags=REQUEST | DUMP))
            assert got == kind and attributes(payload)[DEV_NAME] == NAME.encode() + b"\0"
            (done,) = self.receive()
            assert done[0] == DONE

    def check_refusals(self):
        for kind in (SET, RES_CQ_GET, NLDEV + 1000, 1 << 10, 63 << 10, 0, DONE, 0xffff):
            for flags in (REQUEST | ACK, REQUEST, REQUEST | DUMP):
                assert self.refused(request(kind, attribute(DEV_INDEX, 0), flags=flags)) == errno.EOPNOTSUPP, hex(kind)
        for message in (request(GET), request(GET, attribute(DEV_INDEX, 1)), request(PORT_GET, attribute(DEV_INDEX, 0)),
                        request(PORT_GET, attribute(DEV_INDEX, 0), attribute(PORT_INDEX, 2)), request(RES_GET),
                        request(GET_CHARDEV, attribute(CHARDEV_TYPE, "umad")), request(GET_CHARDEV),
                        request(GET, attribute(DEV_INDEX, 7), flags=REQUEST | DUMP), request(GET, b"\3\0\1\0"),
                        request(GET, b"\xff\xff\1\0\0\0\0\0")):
            assert self.refused(message) == errno.EINVAL, message

    def check_other_datagrams(self):
        """Datagrams without a request get no answer; several requests get theirs in order."""
        good = request(SYS_GET, flags=REQUEST)
        for nothing in (b"", b"\1", b"\xff" * 40, bytes(16), good[:15], struct.pack("=I", 15) + good[4:]):
            assert self.socket.sendto(nothing, (0, 0)) == len(nothing)
        assert status(self.ask(request(GET, flags=ACK))[0]) == 0, "no request: only the acknowledgement"
        self.socket.sendto(good + request(SYS_GET, flags=REQUEST, sequence=8) + b"\0", (0, 0))
        assert [self.receive()[0][1] for _ in range(2)] == [7, 8]

    def check_calls(self):
        """All functions that send, with and without an address, and before and after `connect` and `bind`."""
        message = request(SYS_GET, flags=REQUEST)
        for prepare in (lambda asked: None, lambda asked: asked.bind((0, 0)), lambda asked: asked.connect((0, 0))):
            asked = Requests(bind=False)
            prepare(asked.socket)
            for send in (asked.socket.send, lambda data: asked.socket.sendto(data, (0, 0)),
                         lambda data: asked.socket.sendmsg([data[:5], data[5:]]), lambda data: asked.socket.sendmsg([data], [], 0, (0, 0)),
                         lambda data: os.write(asked.socket.fileno(), data)):
                assert send(message) == len(message)
                assert asked.receive()[0][0] == SYS_GET
            asked.socket.close()

    def check_other_sockets(self):
        """A number that was such a socket's is used for others; other netlink families are the kernel's."""
        number = self.socket.fileno()
        self.socket.close()
        left, right = socket.socketpair()
        assert number in (left.fileno(), right.fileno())
        for one, other in ((left, right), (right, left)):
            one.send(b"x")
            os.write(one.fileno(), b"y")
            assert other.recv(1) + other.recv(1) == b"xy"
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as routes:
            routes.sendto(request(0xfff0), (0, 0))
            assert status(next(answers(routes.recv(4096)))) == errno.EOPNOTSUPP

    def check_all(self):
        for name in (name for name in dir(self) if name.startswith("check_") and name not in ("check_all", "check_other_sockets")):
            getattr(self, name)()
        self.check_other_sockets()


class RdmaNetlink(NegativeTest):
    def terrace(self, *command, address=None):
        command = procs.under_terrace(command, "--device-name", NAME, addr=address or fresh_address())
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertEqual((outcome.returncode, outcome.stderr), (0, ""))
        return outcome.stdout

    def test_requests_and_refusals(self):
        self.terrace(sys.executable, __file__, "requests")


@unittest.skipUnless(shutil.which("rdma"), "needs iproute2's rdma")
class Iproute2(RdmaNetlink):
    def rdma(self, *arguments, address=None):
        return json.loads(self.terrace("rdma", "-j", *arguments, address=address))

    def test_devices(self):
        address = fresh_address()
        (device,) = self.rdma("dev", "show", address=address)
        self.assertEqual({name: device[name] for name in ("ifindex", "ifname", "node_type")},
                         {"ifindex": 0, "ifname": NAME, "node_type": "ca"})
        self.assertEqual(device["node_guid"], device["sys_image_guid"])
        guid = device["node_guid"].replace(":", "")
        self.assertRegex(self.terrace("ibv_devices", address=address), rf"{NAME}\s+{guid}")
        self.assertEqual(self.rdma("dev", "show", NAME, address=address), [device])

    def test_links(self):
        expected = {"ifindex": 0, "port": 1, "ifname": NAME, "state": "ACTIVE", "physical_state": "LINK_UP", "netdev": "lo",
                    "netdev_index": socket.if_nametoindex("lo")}
        self.assertEqual(self.rdma("link", "show"), [expected])
        self.assertEqual(self.rdma("link", "show", f"{NAME}/1"), [expected])
        # The order of arguments of rdma-core's tests.
        self.assertEqual(json.loads(self.terrace("rdma", "link", "show", "-j")), [expected])

    def test_resources_are_those_of_all_processes(self):
        left, right, *_ = self.pair()
        (device,) = self.rdma("resource", "show")
        self.assertEqual(device["ifname"], NAME)
        for name in ("pd", "cq", "qp", "mr"):
            self.assertGreaterEqual(device[name], 2, name)
        pairs = {(pair["pid"], pair["type"], pair["state"]) for pair in self.rdma("resource", "show", "qp")}
        for end in (left, right):
            self.assertIn((end.pid, "RC", "RTS"), pairs)

    def test_system(self):
        self.assertIn("netns shared", self.terrace("rdma", "system"))

    def test_changes_are_refused(self):
        command = procs.under_terrace(["rdma", "dev", "set", "terrace0", "name", "other0"], addr=fresh_address())
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertNotEqual(outcome.returncode, 0)
        self.assertIn("Operation not supported", outcome.stderr)


if __name__ == "__main__":
    if sys.argv[1:] == ["requests"]:
        Requests().check_all()
    else:
        unittest.main()
