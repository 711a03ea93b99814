"""Registered memory that is removed during accesses, memory of every kind, and processes that fork."""

import contextlib
import os
import pathlib
import re
import signal
import tempfile
import time
import unittest

from support import (ALL, ERR, LOC_PROT_ERR, ON_DEMAND, REM_ACCESS_ERR, REM_OP_ERR, RTS, SUCCESS, WR_FLUSH_ERR, NegativeTest,
                     connect, hugepages)

PAGE, HUGE_PAGE = 4096, 2 << 20
PROT_NONE, PROT_READ = 0, 1
HAS_LOCAL_PATH = os.environ.get("TERRACE_PATH", "auto") != "udp"


class VanishingMemory(NegativeTest):
    """The requester gets an error. The process survives, and its other queue pair continues to work."""

    def setUp(self):
        self.client, self.server, self.local, self.witness = self.pair()
        connect(self.client, "witness", self.server, "witness")

    def expect(self, operation, region, offset, size, status, remote_state=ERR):
        """One operation on a region of the server ends with `status`. After an error the queue pair is replaced."""
        remote, rkey = region["addr"] + offset, region["rkey"]
        self.client("post", "q", operation, 1, "m", 0, size, remote, rkey)
        self.assertEqual(self.client.status("q"), status)
        if status != SUCCESS:
            self.assertEqual(self.client("state", "q")["state"], ERR)
            self.assertEqual(self.server("state", "q")["state"], remote_state)
            for end in (self.client, self.server):
                end("destroy", "q")
                del end.qpns["q"]
            connect(self.client, "q", self.server, "q")
        self.expect_other_queue_pair_works()

    def expect_other_queue_pair_works(self):
        self.client("post", "witness", "read", 2, "m", 0, 64, self.witness["addr"], self.witness["rkey"])
        self.assertEqual(self.client.status("witness"), SUCCESS)

    def test_unmapped(self):
        region = self.server.mr("r", "anon", 16 * PAGE)
        self.expect("write", region, 0, 16 * PAGE, SUCCESS)
        self.server("unmap", "r", 8 * PAGE, 4 * PAGE)
        for operation in ("read", "write"):
            self.expect(operation, region, 8 * PAGE, 8, REM_ACCESS_ERR)
            self.expect(operation, region, 0, 16 * PAGE, REM_ACCESS_ERR)
            self.expect(operation, region, 12 * PAGE - 1, 1, REM_ACCESS_ERR)
            self.expect(operation, region, 12 * PAGE, 4 * PAGE, SUCCESS)
        self.expect("add", region, 8 * PAGE, 8, REM_ACCESS_ERR)

    def test_protected(self):
        region = self.server.mr("r", "anon", 4 * PAGE)
        self.server("protect", "r", 0, PAGE, PROT_NONE)
        self.server("protect", "r", PAGE, PAGE, PROT_READ)
        self.expect("read", region, 0, 8, REM_ACCESS_ERR)
        self.expect("read", region, PAGE, 8, SUCCESS)
        self.expect("write", region, PAGE, 8, REM_ACCESS_ERR)
        self.expect("add", region, PAGE, 8, REM_ACCESS_ERR)
        self.expect("write", region, 2 * PAGE, 2 * PAGE, SUCCESS)
        self.server("protect", "r", 0, 2 * PAGE, PROT_READ | 2)
        self.expect("write", region, 0, 4 * PAGE, SUCCESS)

    def test_truncated(self):
        with tempfile.TemporaryDirectory() as directory:
            for kind in ("file", "memfd"):
                region = self.server.mr(kind, kind, 16 * PAGE, ALL, f"{directory}/data")
                self.expect("write", region, 0, 16 * PAGE, SUCCESS)
                self.server("truncate", kind, 4 * PAGE)
                self.expect("read", region, 4 * PAGE, 8, REM_ACCESS_ERR)
                self.expect("write", region, 15 * PAGE, PAGE, REM_ACCESS_ERR)
                self.expect("add", region, 4 * PAGE, 8, REM_ACCESS_ERR)
                self.expect("read", region, 0, 4 * PAGE, SUCCESS)
                self.server("truncate", kind, 16 * PAGE)
                self.expect("read", region, 0, 16 * PAGE, SUCCESS)

    def test_deregistered(self):
        region = self.server.mr("r", "anon", PAGE)
        self.server("dereg", "r")
        self.expect("read", region, 0, 8, REM_ACCESS_ERR)

    def test_unmapped_at_registration(self):
        region = self.server.mr("r", "anon", 4 * PAGE, ALL | ON_DEMAND)
        self.server("unmap", "r", 0, PAGE)
        self.expect("write", region, 0, 8, REM_ACCESS_ERR)
        self.expect("write", region, PAGE, 8, SUCCESS)

    def test_the_requesters_buffer(self):
        """The requester unmaps the local buffer of its own request: the request ends with a local protection error."""
        self.client.mr("gone", "anon", 4 * PAGE)
        self.client("unmap", "gone", PAGE, PAGE)
        for operation in ("write", "read"):
            self.client("post", "q", operation, 1, "gone", 0, 4 * PAGE, self.witness["addr"], self.witness["rkey"])
            self.client("post", "q", operation, 2, "m", 0, 8, self.witness["addr"], self.witness["rkey"])
            self.assertEqual(self.client.poll("q", 2), [(1, LOC_PROT_ERR), (2, WR_FLUSH_ERR)])
            self.expect_other_queue_pair_works()
            for end in (self.client, self.server):
                end("destroy", "q")
                del end.qpns["q"]
            connect(self.client, "q", self.server, "q")

    def test_the_buffer_of_a_receive(self):
        self.server.mr("gone", "anon", PAGE)
        self.server("recv", "q", 7, "gone", 0, PAGE)
        self.server("unmap", "gone", 0, PAGE)
        self.client("post", "q", "send", 1, "m", 0, 64, 0, 0)
        self.assertEqual(self.client.status("q"), REM_OP_ERR)
        self.assertEqual(self.server.poll("q"), [(7, LOC_PROT_ERR)])
        self.expect_other_queue_pair_works()

    def test_in_the_middle_of_traffic(self):
        """Pages become inaccessible and accessible again while another queue pair streams at full speed. Its data stays
        correct."""
        region = self.server.mr("r", "anon", 16 * PAGE)
        self.client.mr("s", "anon", 2 << 14)
        self.client("stream", "witness", "s", self.witness["addr"], self.witness["rkey"])
        for number in range(8):
            self.server("protect", "r", number * PAGE, PAGE, PROT_NONE)
            self.client("post", "q", "write", 1, "m", 0, 16 * PAGE, region["addr"], region["rkey"])
            self.assertEqual(self.client.status("q"), REM_ACCESS_ERR)
            self.server("protect", "r", number * PAGE, PAGE, PROT_READ | 2)
            for end in (self.client, self.server):
                end("destroy", "q")
                del end.qpns["q"]
            connect(self.client, "q", self.server, "q")
        result = self.client("stop", "witness")
        self.assertEqual((result["wrong"], result["status"]), (0, SUCCESS))
        self.assertGreater(result["rounds"], 0)


class KindsOfMemory(NegativeTest):
    """Memory of each kind is written and read back over RDMA."""

    def write_and_read_back(self, kind, size=64 * PAGE, *path):
        client, server, *_ = self.pair()
        region = server.mr("r", kind, size, ALL, *path)
        self.write_and_read(client, server, region, size)
        return client, server, region

    def write_and_read(self, client, server, region, size, name="r", seed=5):
        client.mr("out", "anon", size)
        client.mr("back", "anon", size)
        client("fill", "out", 0, size, seed)
        client("post", "q", "write", 1, "out", 0, size, region["addr"], region["rkey"])
        client("post", "q", "read", 2, "back", 0, size, region["addr"], region["rkey"])
        self.assertEqual(client.poll("q", 2), [(1, SUCCESS), (2, SUCCESS)])
        self.assertEqual(server("check", name, 0, size, seed)["differ"], 0)
        self.assertEqual(client("check", "back", 0, size, seed)["differ"], 0)
        for own in ("out", "back"):
            client("dereg", own)

    @contextlib.contextmanager
    def reserve(self, count):
        with hugepages.reserve(count) as are_there:
            if not are_there:
                self.skipTest(f"{count} huge pages of 2 MiB are not available (vm.nr_hugepages)")
            yield

    def mappings(self, client):
        """The number of mappings of the server's memory in the client's NIC."""
        return pathlib.Path(f"/proc/{client.pid}/maps").read_text().count("memfd:endpoint")

    def expect_mapped(self, client, region, count):
        """The client's NIC soon maps the region, and then has `count` mappings."""
        def is_mapped():
            client("post", "q", "read", 3, "m", 0, 64, region["addr"], region["rkey"])
            self.assertEqual(client.status("q"), SUCCESS)
            return self.mappings(client) == count
        self.eventually(is_mapped, f"{count} mappings")

    def expect_no_packets(self, client, server, region, size, name, seed):
        """WRITE, READ and fetch-and-add succeed with correct data, and no packet is sent."""
        before = client.counts("q")["tx_packets"]
        self.write_and_read(client, server, region, size, name, seed)
        client("post", "q", "add", 4, "m", 0, 8, region["addr"], region["rkey"], "add=1")
        self.assertEqual(client.status("q"), SUCCESS)
        self.assertEqual(client.counts("q")["tx_packets"], before)

    def test_anonymous(self):
        self.write_and_read_back("anon")

    def test_shared(self):
        client, server, region = self.write_and_read_back("memfd")
        if HAS_LOCAL_PATH:
            self.expect_mapped(client, region, 1)
            self.expect_no_packets(client, server, region, 64 * PAGE, "r", 6)

    def test_huge_pages(self):
        with self.reserve(1):
            self.write_and_read_back("huge", HUGE_PAGE)

    def test_shared_huge_pages(self):
        """A region of whole huge pages, and one that begins and ends within them. The client unmaps them once they are
        deregistered."""
        with self.reserve(2):
            client, server, region = self.write_and_read_back("hugefd", 2 * HUGE_PAGE)
            if not HAS_LOCAL_PATH:
                return
            self.expect_mapped(client, region, 1)
            self.expect_no_packets(client, server, region, 2 * HUGE_PAGE, "r", 6)
            part = server("submr", "part", "r", 3 * PAGE + 8, HUGE_PAGE, ALL)
            self.expect_mapped(client, part, 2)
            self.expect_no_packets(client, server, part, HUGE_PAGE, "part", 7)
            server("truncate", "r", HUGE_PAGE)
            client("post", "q", "read", 5, "m", 0, 8, region["addr"] + HUGE_PAGE, region["rkey"])
            self.assertEqual(client.status("q"), REM_ACCESS_ERR)
            server("dereg", "r")
            self.eventually(lambda: self.mappings(client) == 1, "the whole pages are unmapped")
            server("dereg", "part")
            self.eventually(lambda: self.mappings(client) == 0, "the partial pages are unmapped")

    def test_shared_memory_of_a_killed_peer(self):
        """The client unmaps a killed peer's memory, without further traffic."""
        client, server, region = self.write_and_read_back("memfd")
        if HAS_LOCAL_PATH:
            self.expect_mapped(client, region, 1)
            server.kill()
            self.eventually(lambda: self.mappings(client) == 0, "the memory is unmapped")

    def test_file(self):
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "data"
            self.write_and_read_back("file", 64 * PAGE, path)
            self.assertGreater(len(set(path.read_bytes())), 200, "the file has the data written to the region")

    def test_sparse_64_gib(self):
        """Registered within half a second, usable at both ends; only accessed pages become resident."""
        size = 64 << 30
        client, server, *_ = self.pair()
        started = time.monotonic()
        region = server.mr("r", "sparse", size)
        self.assertLess(time.monotonic() - started, 0.5)
        client("fill", "m", 0, PAGE, 9)
        for number, offset in enumerate((0, size // 2, size - PAGE)):
            client("post", "q", "write", number, "m", 0, PAGE, region["addr"] + offset, region["rkey"])
            self.assertEqual(client.status("q"), SUCCESS)
        client("post", "q", "write", 4, "m", 0, PAGE, region["addr"] + size - PAGE + 1, region["rkey"])
        self.assertEqual(client.status("q"), REM_ACCESS_ERR)
        status = pathlib.Path(f"/proc/{server.pid}/status").read_text()
        self.assertLess(int(re.search(r"VmRSS:\s*(\d+) kB", status)[1]), 64 << 10)


class Fork(NegativeTest):
    def setUp(self):
        self.client, self.server, _, self.region = self.pair()
        self.client("fill", "m", 0, 65536, 3)

    def write_and_check(self, end):
        self.client("post", "q", "write", 1, "m", 0, 65536, self.region["addr"], self.region["rkey"])
        self.assertEqual(self.client.status("q"), SUCCESS)
        self.assertEqual(end("check", "m", 0, 65536, 3)["differ"], 0)

    def test_a_child_changes_its_own_copy(self):
        """A fork at either end, as by system() or for a helper process: the child's writes do not reach the parent's
        memory."""
        self.write_and_check(self.server)
        for how in ("_exit", "exit", "exec"):
            for end in (self.server, self.client):
                child = end("fork", how, "m")["pid"]
                self.client("post", "q", "write", 1, "m", 0, 65536, self.region["addr"], self.region["rkey"])
                self.assertEqual(self.client.status("q"), SUCCESS)
                end("reap", child)
                self.assertEqual(end("check", "m", 0, 65536, 3)["differ"], 0, how)
                self.write_and_check(self.server)

    def test_a_child_that_exits_receives_no_packets_of_its_parent(self):
        """The parent receives the messages that arrive while a child exits. The parent is stopped meanwhile, so only the
        child could receive them from the shared socket."""
        for number in range(10):
            self.server("recv", "q", number, "m", 64 * number, 64)
        child = self.server("fork", "exit")["pid"]
        os.kill(self.server.pid, signal.SIGSTOP)
        self.eventually(self.server_is_stopped, "every thread of the server has stopped")
        for number in range(10):
            self.client("post", "q", "send", number, "m", 64 * number, 64, 0, 0)
        self.eventually(lambda: ") Z " in pathlib.Path(f"/proc/{child}/stat").read_text(), "the child ends")
        time.sleep(0.1)
        self.assertEqual(self.client.poll("q", 1, 0.0), [], "no other process may acknowledge")
        os.kill(self.server.pid, signal.SIGCONT)
        self.server("reap", child)
        self.assertEqual(self.server.poll("q", 10), [(number, SUCCESS) for number in range(10)])
        self.assertEqual(self.client.poll("q", 10), [(number, SUCCESS) for number in range(10)])
        self.assertEqual(self.server("check", "m", 0, 640, 3)["differ"], 0)

    def server_is_stopped(self):
        tasks = pathlib.Path(f"/proc/{self.server.pid}/task").glob("*/stat")
        return all(") T " in task.read_text() for task in tasks)

    def test_a_daemon_uses_the_device_of_its_parent(self):
        server = self.start()
        pid = server("fork", "daemon")["pid"]
        self.addCleanup(lambda: os.path.exists(f"/proc/{pid}") and os.kill(pid, 9))
        server.process.wait(5)
        region = server.mr("d", "anon", 65536)
        connect(self.client, "d", server, "d")
        self.client("post", "d", "write", 1, "m", 0, 65536, region["addr"], region["rkey"])
        self.assertEqual(self.client.status("d"), SUCCESS)
        self.assertEqual(server("check", "d", 0, 65536, 3)["differ"], 0)
        server("recv", "d", 9, "d", 0, 64)
        server("arm", "d")
        self.client("post", "d", "send", 2, "m", 0, 64, 0, 0)
        server("wait", "d", 5)
        self.assertEqual(server.poll("d"), [(9, SUCCESS)])


if __name__ == "__main__":
    unittest.main()
