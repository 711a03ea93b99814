"""The conditions under which processes of a host reach each other without packets."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import unittest
from unittest import mock

from support import PROGRAMS, SUCCESS, TERRACE, NegativeTest, connect

SIZE = 65536
ROUNDS = 30
NOBODY = ("setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all", "--")
IS_ROOT = os.geteuid() == 0


class Transports(NegativeTest):
    """Processes of one user in one network namespace reach each other without packets, others only by packets."""

    def read_in_both_directions(self, left, right):
        """READs of each end from the other, one after the other. The first READs may use packets until the same-host peer
        is found."""
        regions = [end.mr("m", "anon", SIZE) for end in (left, right)]
        connect(left, "q", right, "q")
        for number in range(ROUNDS):
            for end, region in ((left, regions[1]), (right, regions[0])):
                end("post", "q", "read", number, "m", 0, 4096, region["addr"], region["rkey"])
                self.assertEqual(end.poll("q"), [(number, SUCCESS)])
            time.sleep(0.01)

    @staticmethod
    def transport_of(snapshot):
        """The number of same-host peers, and the queue pair's count of sent packets."""
        (pair,) = snapshot["queue_pairs"]
        return snapshot["same_host"]["peers"], pair["counts"]["tx_packets"]

    def test_one_user(self):
        ends = self.start(), self.start()
        self.read_in_both_directions(*ends)
        for end in ends:
            peers, packets = self.transport_of(end.stat())
            self.assertEqual(peers, 1)
            self.assertLess(packets, ROUNDS)

    @unittest.skipUnless(IS_ROOT and shutil.which("setpriv"), "needs root and setpriv")
    def test_two_users(self):
        # The copy is readable by any user.
        directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        directory.chmod(0o755)
        for part in ("bin", "lib"):
            shutil.copytree(TERRACE.parents[1] / part, directory / part)
        program = shutil.copy(PROGRAMS / "endpoint", directory)
        mine = self.start()
        with mock.patch.dict("os.environ", TERRACE=str(directory / "bin/terrace")):
            theirs = self.start(wrapper=NOBODY, program=(program,))
        self.assertEqual(os.stat(f"/proc/{theirs.pid}").st_uid, 65534)
        self.read_in_both_directions(mine, theirs)
        for end in (mine, theirs):
            peers, packets = self.transport_of(end.stat())
            self.assertEqual(peers, 0)
            self.assertGreaterEqual(packets, ROUNDS)

    @unittest.skipUnless(IS_ROOT and shutil.which("nsenter") and shutil.which("ip"), "needs root, nsenter and ip")
    def test_two_network_namespaces(self):
        inside = [self.namespace(), self.namespace()]
        made = subprocess.run([*inside[0], "ip", "link", "add", "left", "type", "veth", "peer", "name", "right", "netns", inside[1][2]],
                              capture_output=True, text=True)
        if made.returncode != 0:
            self.skipTest(f"cannot create a pair of interfaces: {made.stderr.strip()}")
        ends = []
        for wrapper, name, address in zip(inside, ("left", "right"), ("192.0.2.1", "192.0.2.2")):
            subprocess.run([*wrapper, "ip", "address", "add", f"{address}/24", "dev", name], check=True)
            subprocess.run([*wrapper, "ip", "link", "set", name, "up"], check=True)
            ends.append(self.start(address, wrapper=wrapper))
        self.read_in_both_directions(*ends)
        for end, wrapper in zip(ends, inside):
            # The status socket is in the namespace, so `terrace stat` must run there.
            shown = subprocess.run([*wrapper, TERRACE, "stat", str(end.pid), "--json"], capture_output=True, text=True, check=True)
            peers, packets = self.transport_of(json.loads(shown.stdout)["devices"][0])
            self.assertEqual(peers, 0)
            self.assertGreaterEqual(packets, ROUNDS)

    def namespace(self):
        """The argv prefix that runs a command in a new network namespace, which is removed after the test."""
        holder = subprocess.Popen(["unshare", "--net", "sleep", "600"])
        self.addCleanup(holder.wait)
        self.addCleanup(holder.kill)
        own = os.readlink("/proc/self/ns/net")
        self.eventually(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != own, "a separate namespace")
        return ["nsenter", "-t", str(holder.pid), "-n"]


if __name__ == "__main__":
    unittest.main()
