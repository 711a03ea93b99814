"""NP-RDMA for unmodified programs: `terrace run --nic commodity`, and programs that swap their memory themselves."""

import errno
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from harness import procs  # noqa: E402
from harness.endpoint import (  # noqa: E402
    LOCAL_WRITE, REM_ACCESS_ERR, REM_OP_ERR, REMOTE_WRITE, RETRY_EXC_ERR, SUCCESS, WR_FLUSH_ERR, Endpoint, connect)

MIB = 1 << 20
REGION, DRAM, PAGE = 8 * MIB, "2M", 4096
SEED = 7
# The server's storage takes so long that the order of requests for absent and present pages can be seen.
SLOW_READS = """
[[fault]]
kind = "slow-storage"
operation = "read"
delay_us_min = 800000
"""
OWN_SWAP = ROOT / "build/examples/own_swap"
STOPPING = ROOT / "build/negative/libraries/stopping.so"


def pages_of(end):
    (region,) = end.stat()["memory"]["regions"]
    return region


class Commodity(unittest.TestCase):
    """Two programs on NICs that know nothing of absent pages; the server's region is four times its budget."""

    transport = "udp"
    options = ()

    def setUp(self):
        directory = self.enterContext(tempfile.TemporaryDirectory(dir="/var/tmp"))
        options = ("--path", self.transport, "--nic", "commodity", *self.options)
        self.server = Endpoint("127.0.3.1", *options, "--dram", DRAM, "--swap", directory)
        self.client = Endpoint("127.0.3.2", *options)
        for end in (self.server, self.client):
            self.addCleanup(end.stop)
            end("open")
        self.remote = self.server.mr("region", "anon", REGION)
        self.server("fill", "region", 0, REGION, SEED)
        self.client.mr("buffer", "anon", REGION)
        # The scan notes that pages have left.
        procs.wait_until(lambda: pages_of(self.server)["resident_bytes"] <= 2 * MIB, "pages leave")

    def connect(self, **attributes):
        connect(self.client, "q", self.server, "q", **attributes)

    def counters(self, end):
        return end.stat()["np"]

    def post(self, name, op, offset, length, *words, at=0):
        self.client("post", name, op, offset % 1000, "buffer", at, length, self.remote["addr"] + offset,
                    self.remote["rkey"], *words)

    def completes(self, name="q", count=1):
        """So many requests succeed, in the order of posting."""
        for _ in range(count):
            self.assertEqual(self.client.status(name, 20), SUCCESS, self.server.error_output())

    def differing(self, end, region, offset, length, seed, start):
        return end("check", region, offset, length, seed, f"from={start}")["differ"]

    def test_reads_of_absent_pages_bring_their_data(self):
        self.connect()
        # The last one needs more calls than the peer holds pages for at a time, several times over.
        for offset, length in ((0, 64), (4096, 4096), (3 * MIB + 100, 100_000), (5 * MIB - 7, MIB), (MIB + 3, 6 * MIB)):
            self.post("q", "read", offset, length)
            self.completes()
            self.assertEqual(self.differing(self.client, "buffer", 0, length, SEED, offset), 0, (offset, length))
        counters = self.counters(self.client)
        self.assertGreater(counters["fallback_signature"], 0)
        self.assertEqual(counters["holds"] > 0, bool(self.options), "the peer moves the bytes, unless it may not")
        self.assertGreater(self.counters(self.server)["served"], 0)

    def test_writes_to_absent_pages_arrive(self):
        # A program that only writes does not permit READs.
        self.connect(access=LOCAL_WRITE | REMOTE_WRITE)
        self.client("fill", "buffer", 0, REGION, 9)
        ranges = ((64, 8), (4096, 4096), (3 * MIB + 100, 100_000), (5 * MIB - 7, MIB), (64, 500))
        for offset, length in ranges:
            self.post("q", "write", offset, length, at=offset)
        self.completes(count=len(ranges))
        for offset, length in ranges:
            self.assertEqual(self.differing(self.server, "region", offset, length, 9, offset), 0, (offset, length))
        # What is beside them is as before.
        self.assertEqual(self.differing(self.server, "region", 2 * MIB, MIB, SEED, 2 * MIB), 0)
        self.assertGreater(self.counters(self.client)["fallback_absent"], 0)

    def test_atomics_and_messages(self):
        self.connect()
        self.server("word", "region", 4096, 5)
        procs.wait_until(lambda: pages_of(self.server)["resident_bytes"] <= 2 * MIB, "pages leave")
        for _ in range(3):
            self.post("q", "add", 4096, 8, "add=2")
        self.completes(count=3)
        self.assertEqual(self.server("word", "region", 4096)["value"], 11)
        self.server.mr("in", "anon", MIB)
        self.server("recv", "q", 1, "in", 0, 4096)
        self.server("recv", "q", 2, "in", 4096, 4096)
        self.client("fill", "buffer", 0, 4096, 3)
        self.client("post", "q", "send", 1, "buffer", 0, 4096, 0, 0)
        self.post("q", "write_imm", 6 * MIB, 4096, "imm=77")
        self.completes(count=2)
        self.assertEqual(self.server.poll("q", 2, 10), [(1, SUCCESS), (2, SUCCESS)])
        self.assertEqual(self.differing(self.server, "region", 6 * MIB, 4096, 3, 0), 0)

    def test_completion_channels_and_idle_processes(self):
        self.connect()
        self.client("arm", "q")
        self.post("q", "read", 7 * MIB, 4096)
        self.client("wait", "q", 10)
        self.completes()
        before = [cpu_ticks(end.pid) for end in (self.client, self.server)]
        time.sleep(1)
        after = [cpu_ticks(end.pid) for end in (self.client, self.server)]
        self.assertLessEqual(max(now - then for then, now in zip(before, after)), 3, "an idle process costs nothing")

    def test_a_refused_access_ends_as_it_does_with_ordinary_memory(self):
        self.connect()
        self.post("q", "read", REGION - 4, 64)
        self.post("q", "read", 0, 64)
        statuses = [self.client.status("q", 20) for _ in range(2)]
        self.assertEqual(statuses, [REM_ACCESS_ERR, WR_FLUSH_ERR])

    def test_a_write_with_immediate_that_can_never_be_held_is_refused(self):
        self.connect()
        self.server.mr("in", "anon", PAGE)
        self.server("recv", "q", 1, "in", 0, 64)
        started = time.monotonic()
        # Half of the budget can be held.
        self.post("q", "write_imm", 0, 4 * MIB, "imm=5")
        self.assertEqual(self.client.status("q", 20), REM_OP_ERR)
        self.assertLess(time.monotonic() - started, 5)

    def test_memory_that_a_peer_knows_as_present_does_not_become_absent(self):
        self.connect()
        known, unknown = self.server.mr("known", "anon", PAGE), self.server.mr("unknown", "anon", PAGE)
        self.server("fill", "known", 0, PAGE, 3)
        for _ in range(2):
            self.client("post", "q", "read", 1, "buffer", 0, PAGE, known["addr"], known["rkey"])
            self.completes()
            self.assertEqual(self.client("check", "buffer", 0, PAGE, 3)["differ"], 0)
            # The client would take signature pages for its data, and lose its WRITEs.
            with self.assertRaises(OSError) as refused:
                self.server("rereg", "known", "region", 0, REGION, 15)
            self.assertEqual(refused.exception.errno, errno.EBUSY)
        moved = self.server("rereg", "unknown", "region", 0, REGION, 15)
        self.client("post", "q", "read", 2, "buffer", 0, MIB, moved["addr"], unknown["rkey"])
        self.completes()
        self.assertEqual(self.client("check", "buffer", 0, MIB, SEED)["differ"], 0)

    def test_descriptions_and_version_tables_end_with_their_regions(self):
        self.connect()
        self.post("q", "read", 0, 8)
        self.completes()
        self.client("fill", "buffer", 0, 4096, 9)
        objects = self.server.stat()["objects"]["memory_regions"]
        for number in range(20):
            name = f"region{number}"
            self.remote = self.server.mr(name, "anon", MIB)
            self.post("q", "write", 0, 4096)
            self.completes()
            self.assertEqual(self.differing(self.server, name, 0, 4096, 9, 0), 0)
            self.assertGreater(self.server.stat()["objects"]["memory_regions"], objects + 1, "a version table is open")
            self.server("dereg", name)
            # The peer learns that the region has ended, also while it has no requests.
            procs.wait_until(lambda: self.server.stat()["objects"]["memory_regions"] == objects, "the table is closed")
        self.post("q", "write", 0, 8)
        self.assertEqual(self.client.status("q", 20), REM_ACCESS_ERR, "the region has ended")

    def test_version_tables_end_with_a_peer_that_cannot_be_asked(self):
        objects = self.server.stat()["objects"]["memory_regions"]
        self.connect()
        self.client("fill", "buffer", 0, 4096, 9)
        self.post("q", "write", 0, 4096)
        self.completes()
        self.assertGreater(self.server.stat()["objects"]["memory_regions"], objects, "a version table is open")
        self.client.kill()
        self.server("dereg", "region")
        procs.wait_until(lambda: self.server.stat()["objects"]["memory_regions"] < objects, "the table is closed")

    def test_a_peer_that_is_reset_later_is_waited_for(self):
        self.connect()
        self.post("q", "read", 0, 64)
        self.completes()
        self.client("connect", "q", self.server.address, self.server.qpns["q"])
        self.post("q", "read", 4096, 4096)
        # The server's session still is that of the connection before.
        time.sleep(0.3)
        self.server("connect", "q", self.client.address, self.client.qpns["q"])
        self.completes()
        self.assertEqual(self.differing(self.client, "buffer", 0, 4096, SEED, 4096), 0)

    def test_a_queue_pair_without_requests_ends(self):
        self.connect()
        for end in (self.server, self.client):
            end("error", "q")
            end("destroy", "q")


class CommodityLocal(Commodity):
    """The same over shared memory."""

    transport = "local"


class CommodityWithoutReverseTransfers(Commodity):
    """The peer holds its pages instead of moving their bytes."""

    options = ("--np-reverse", "off")


class SlowStorage(unittest.TestCase):
    """The server's absent pages take most of a second to come."""

    def setUp(self):
        directory = self.enterContext(tempfile.TemporaryDirectory(dir="/var/tmp"))
        plan = pathlib.Path(directory) / "slow.toml"
        plan.write_text(SLOW_READS)
        udp = ("--path", "udp", "--nic", "commodity")
        self.server = Endpoint("127.0.3.6", *udp, "--dram", DRAM, "--swap", directory, "--fault-plan", plan)
        self.client = Endpoint("127.0.3.7", *udp)
        for end in (self.server, self.client):
            self.addCleanup(end.stop)
            end("open")
        self.remote = self.server.mr("region", "anon", REGION)
        self.server("fill", "region", 0, REGION, SEED)
        self.client.mr("buffer", "anon", REGION)
        procs.wait_until(lambda: pages_of(self.server)["resident_bytes"] <= 2 * MIB, "pages leave")
        connect(self.client, "q", self.server, "q")

    def post(self, op, offset, length, *words, at=0):
        self.client("post", "q", op, offset % 1000, "buffer", at, length, self.remote["addr"] + offset, self.remote["rkey"], *words)

    def is_flag_seen_first(self, of_data, of_flag):
        """WRITEs data to an absent page, then a flag to a present one. Whether the server sees the flag without the data."""
        flag, data = REGION - 64, 4096
        self.server("word", "region", flag, 0)
        self.client("word", "buffer", 0, 1)
        self.client("fill", "buffer", 4096, 4096, 9)
        # The page is known to be present, so that its WRITE is not delayed.
        self.post("write", flag + 8, 8)
        self.assertEqual(self.client.status("q", 20), SUCCESS)
        self.post("write", data, 4096, *of_data, at=4096)
        self.post("write", flag, 8, *of_flag)
        procs.wait_until(lambda: self.server("word", "region", flag)["value"] == 1, "the flag arrives")
        is_first = self.client.poll("q", 1, 0) == []
        for _ in range(2 if is_first else 1):
            self.assertEqual(self.client.status("q", 20), SUCCESS)
        self.assertEqual(self.server("check", "region", data, 4096, 9, "from=4096")["differ"], 0)
        return is_first

    def test_without_ordering_bits_a_write_may_pass_one_to_an_absent_page(self):
        self.assertTrue(self.is_flag_seen_first((), ()))

    def test_the_bit_before_orders_a_write_behind_all_earlier_requests(self):
        self.assertFalse(self.is_flag_seen_first((), ("order=before",)))

    def test_the_bit_after_orders_all_later_requests_behind_a_write(self):
        self.assertFalse(self.is_flag_seen_first(("order=after",), ()))

    def test_the_error_state_flushes_what_the_peer_has_not_answered(self):
        for number in range(4):
            self.post("read", (number + 1) * MIB, 64 << 10)
        # The server has acknowledged the calls for the pages, and reads them from its storage.
        time.sleep(0.3)
        started = time.monotonic()
        self.client("error", "q")
        completions = self.client.poll("q", 4, 20)
        self.assertLess(time.monotonic() - started, 0.3)
        self.assertEqual([status for _, status in completions], 4 * [WR_FLUSH_ERR])

    def test_nothing_changes_behind_the_error_state(self):
        """The server's queue pair is moved to it while the client's requests wait for their pages."""
        requests = (("write", 8, ()), ("add", 8, ("add=1",)), ("write", 64 << 10, ()))
        for number, (op, length, words) in enumerate(requests):
            with self.subTest(op=op, length=length):
                name, offset = f"q{number}", (number + 1) * MIB
                connect(self.client, name, self.server, name)
                # The client learns of the region: its next request waits for nothing but the page.
                self.client("post", name, "read", 1, "buffer", 0, 8, self.remote["addr"] + REGION - 8, self.remote["rkey"])
                self.assertEqual(self.client.status(name, 20), SUCCESS)
                self.client("fill", "buffer", 0, length, 9)
                at = self.remote["addr"] + offset
                self.client("post", name, op, 2, "buffer", 0, length, at, self.remote["rkey"], *words)
                time.sleep(0.3)
                self.server("error", name)
                time.sleep(2)
                self.assertEqual(self.server("check", "region", offset, length, SEED)["differ"], 0)

    def test_a_peer_that_vanishes_before_it_answers_is_noticed(self):
        self.post("read", 4096, 4096)
        # The server has acknowledged the call for the page, and reads it from its storage.
        time.sleep(0.3)
        self.server.kill()
        self.assertEqual(self.client.status("q", 20), RETRY_EXC_ERR)


class SlowNetwork(unittest.TestCase):
    """A round trip takes half a second, and the client has one READ in flight at a time."""

    READ_COUNT = 24

    def test_what_is_held_for_a_request_stays_held_while_earlier_ones_take_longer_than_the_limit(self):
        directory = self.enterContext(tempfile.TemporaryDirectory(dir="/var/tmp"))
        plan = pathlib.Path(directory) / "slow.toml"
        plan.write_text("delay_us_min = 500000\ndelay_us_max = 500000\n")
        udp = ("--path", "udp", "--nic", "commodity")
        server = Endpoint("127.0.3.13", *udp, "--dram", DRAM, "--swap", directory, "--fault-plan", plan)
        client = Endpoint("127.0.3.14", *udp)
        for end in (server, client):
            self.addCleanup(end.stop)
            end("open")
        remote = server.mr("region", "anon", REGION)
        server.mr("in", "anon", PAGE)
        client.mr("buffer", "anon", MIB)
        client("fill", "buffer", 0, PAGE, SEED)
        connect(client, "q", server, "q", timeout=18, rd_atomic=1)
        server("recv", "q", 1, "in", 0, 64)
        for number in range(self.READ_COUNT):
            client("post", "q", "read", number, "buffer", (number + 1) * PAGE, 8, remote["addr"] + MIB, remote["rkey"])
        # The server holds its page from here on. It goes behind the READs, in 12 s.
        client("post", "q", "write_imm", self.READ_COUNT, "buffer", 0, PAGE, remote["addr"], remote["rkey"], "imm=5")
        completions = client.poll("q", self.READ_COUNT + 1, 30)
        self.assertEqual(completions, [(number, SUCCESS) for number in range(self.READ_COUNT + 1)], server.error_output())
        self.assertEqual(server.poll("q", 1, 10), [(1, SUCCESS)])
        self.assertEqual(server("check", "region", 0, PAGE, SEED, "from=0")["differ"], 0)


class StoppedAtTheStart(unittest.TestCase):
    """The server is stopped before the client's first request, for longer than the client waits for an answer to its datagrams."""

    STOPPED_S = 4.5

    def stopped_before(self, transport, post, is_known=False):
        """A server that stops before `post` of the client, and goes on. The client has accessed its memory before if `is_known`."""
        directory = self.enterContext(tempfile.TemporaryDirectory(dir="/var/tmp"))
        options = ("--path", transport, "--nic", "commodity")
        server, client = Endpoint("127.0.3.11", *options, "--dram", DRAM, "--swap", directory), Endpoint("127.0.3.12", *options)
        for end in (server, client):
            self.addCleanup(end.stop)
            end("open")
        remote = server.mr("region", "anon", REGION)
        server("fill", "region", 0, REGION, SEED)
        server("word", "region", 5 * PAGE, 40)
        client.mr("buffer", "anon", REGION)
        client("fill", "buffer", PAGE, PAGE, 9)
        procs.wait_until(lambda: pages_of(server)["resident_bytes"] <= 2 * MIB, "pages leave")
        # 8.6 s until a request that is never acknowledged fails.
        connect(client, "q", server, "q", timeout=18)
        if is_known:
            client("post", "q", "read", 9, "buffer", 0, PAGE, remote["addr"] + 7 * PAGE, remote["rkey"])
            self.assertEqual(client.poll("q", 1, 20), [(9, SUCCESS)])
        server.process.send_signal(signal.SIGSTOP)
        self.addCleanup(server.process.send_signal, signal.SIGCONT)
        procs.wait_until(lambda: thread_states(server.pid) == {"T"}, "all threads are stopped")
        post(client, remote)
        time.sleep(self.STOPPED_S)
        self.assertEqual(client.poll("q", 1, 0), [], "nobody has told the client that the memory is present")
        server.process.send_signal(signal.SIGCONT)
        return server, client, remote

    def run_requests(self, transport, is_known=False):
        def post(client, remote):
            # Two pages that have left.
            client("post", "q", "read", 1, "buffer", 0, PAGE, remote["addr"] + PAGE, remote["rkey"])
            client("post", "q", "write", 2, "buffer", PAGE, PAGE, remote["addr"] + 3 * PAGE, remote["rkey"])

        server, client, _ = self.stopped_before(transport, post, is_known)
        self.assertEqual(client.poll("q", 2, 20), [(1, SUCCESS), (2, SUCCESS)])
        self.assertEqual(client("check", "buffer", 0, PAGE, SEED, f"from={PAGE}")["differ"], 0)
        self.assertEqual(server("check", "region", 3 * PAGE, PAGE, 9, f"from={PAGE}")["differ"], 0)
        self.assertGreater(client.stat()["np"]["fallback_signature"], 0)

    def run_atomics(self, transport):
        def post(client, remote):
            for number in (1, 2):
                client("post", "q", "add", number, "buffer", 0, 8, remote["addr"] + 5 * PAGE, remote["rkey"], "add=1")

        server, client, remote = self.stopped_before(transport, post)
        self.assertEqual(client.poll("q", 2, 20), [(1, SUCCESS), (2, SUCCESS)])
        self.assertEqual((client("word", "buffer", 0)["value"], server("word", "region", 5 * PAGE)["value"]), (41, 42))
        client("post", "q", "read", 3, "buffer", 0, PAGE, remote["addr"] + PAGE, remote["rkey"])
        self.assertEqual(client.poll("q", 1, 20), [(3, SUCCESS)])
        self.assertEqual(client("check", "buffer", 0, PAGE, SEED, f"from={PAGE}")["differ"], 0)

    def test_its_absent_memory_is_not_taken_for_present_by_udp(self):
        self.run_requests("udp")

    def test_its_absent_memory_is_not_taken_for_present_within_the_host(self):
        self.run_requests("local")

    def test_a_peer_that_stops_later_is_waited_for_by_udp(self):
        self.run_requests("udp", is_known=True)

    def test_nor_by_atomics_alone_by_udp(self):
        self.run_atomics("udp")

    def test_nor_by_atomics_alone_within_the_host(self):
        self.run_atomics("local")


class StoppedInACopy(unittest.TestCase):
    """The server is stopped while it copies from the memory that the client's control queue pair lends it. The client waits for such
    a copy's end before it frees that memory, for up to 10 s, and nothing else of the client waits with it."""

    SOON_S = 3
    WRITE_BYTES = 64 << 10

    def setUp(self):
        directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(dir="/var/tmp")))
        self.stopping = directory / "stop"
        local = ("--path", "local", "--nic", "commodity")
        library = ("env", f"TERRACE_STOPPING_FILE={self.stopping}", f"LD_PRELOAD={STOPPING}")
        self.server = Endpoint("127.0.3.8", *local, "--dram", DRAM, "--swap", directory, wrapper=library)
        self.client, self.third = Endpoint("127.0.3.9", *local), Endpoint("127.0.3.10", *local)
        for end in (self.server, self.client, self.third):
            self.addCleanup(end.stop)
            end("open")
        self.addCleanup(self.server.process.send_signal, signal.SIGCONT)
        self.remote = self.server.mr("region", "anon", REGION)
        self.server("fill", "region", 0, REGION, SEED)
        self.third.mr("region", "anon", MIB)
        self.client.mr("buffer", "anon", REGION)
        procs.wait_until(lambda: pages_of(self.server)["resident_bytes"] <= 2 * MIB, "pages leave")
        connect(self.client, "q", self.server, "q")
        connect(self.client, "other", self.third, "q")
        self.receive_from_third()
        self.stop_server()

    def post(self, number):
        offset = number * self.WRITE_BYTES % REGION
        self.client("post", "q", "write", number, "buffer", offset, self.WRITE_BYTES, self.remote["addr"] + offset, self.remote["rkey"])

    def stop_server(self):
        """WRITEs to absent pages, until the server stops in its READ for one of them. A READ behind a message that is not
        acknowledged yet goes by packets."""
        self.stopping.touch()
        for number in range(50 * REGION // self.WRITE_BYTES):
            self.post(number)
            while not self.client.poll("q", 1, 0.05):
                if process_state(self.server.pid) == "T":
                    return
        self.fail("the server has copied nothing from the client's memory")

    def receive_from_third(self):
        """A message of the third end, for whose receive nothing but the client's engine makes progress. Returns its duration."""
        started = time.monotonic()
        self.client("recv", "other", 1, "buffer", 0, 64)
        self.client("arm", "other")
        self.third("post", "q", "send", 1, "region", 0, 64, 0, 0)
        self.client("wait", "other", 15)
        self.assertEqual((self.client.status("other"), self.third.status("q")), (SUCCESS, SUCCESS))
        return time.monotonic() - started

    def ending_threads(self):
        """Threads that wait for a copy's end, to free memory."""
        listed = subprocess.run(["ps", "-L", "-o", "comm=", "-p", str(self.client.pid)], capture_output=True, text=True, check=True)
        return [name for name in listed.stdout.split() if name == "terrace-np-end"]

    def assert_memory_ends_with_the_copy(self):
        procs.wait_until(self.ending_threads, "a thread waits for the copy")
        for comm in pathlib.Path(f"/proc/{self.client.pid}/task").glob("*/comm"):
            if comm.read_text().strip() == "terrace-np-end":
                blocked = re.search(r"SigBlk:\s*(\w+)", (comm.parent / "status").read_text())[1]
                self.assertTrue(int(blocked, 16) >> signal.SIGUSR1 - 1 & 1, "it takes the program's signals")
        time.sleep(0.2)
        self.assertTrue(self.ending_threads(), "the copy has not ended")
        self.server.process.send_signal(signal.SIGCONT)
        procs.wait_until(lambda: not self.ending_threads(), "the memory is freed")

    def test_its_queue_pair_is_destroyed(self):
        started = time.monotonic()
        self.client("destroy", "q")
        self.assertLess(time.monotonic() - started, self.SOON_S)
        self.assertLess(self.receive_from_third(), self.SOON_S)
        self.assert_memory_ends_with_the_copy()

    def test_its_control_queue_pair_fails(self):
        slowest, completions, deadline = 0, [], time.monotonic() + 20
        while not completions and time.monotonic() < deadline:
            slowest = max(slowest, self.receive_from_third())
            completions = self.client.poll("q", 1, 0)
        self.assertEqual([status for _, status in completions], [RETRY_EXC_ERR])
        self.assertLess(max(slowest, self.receive_from_third()), self.SOON_S)
        self.assert_memory_ends_with_the_copy()


def thread_states(pid):
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in pathlib.Path(f"/proc/{pid}/task").glob("*/stat")}


def process_state(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cpu_ticks(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


class OtherPeers(unittest.TestCase):
    def test_a_peer_with_the_other_model_is_accessed_as_an_ordinary_one(self):
        server, client = Endpoint("127.0.3.3"), Endpoint("127.0.3.4", "--nic", "commodity")
        for end in (server, client):
            self.addCleanup(end.stop)
            end("open")
        remote = server.mr("region", "anon", MIB)
        client.mr("buffer", "anon", MIB)
        server("fill", "region", 0, MIB, SEED)
        connect(client, "q", server, "q")
        client("post", "q", "read", 1, "buffer", 0, MIB, remote["addr"], remote["rkey"])
        self.assertEqual(client.status("q"), SUCCESS)
        self.assertEqual(client("check", "buffer", 0, MIB, SEED)["differ"], 0)


class OwnSwap(unittest.TestCase):
    """examples/own_swap.c tells of pages that leave and come."""

    def run_with(self, *options):
        command = procs.under_terrace([OWN_SWAP, "2"], *options, addr="127.0.3.5")
        ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
        self.assertEqual(ended.returncode, 0, ended.stderr + ended.stdout)

    def test_on_either_nic(self):
        for nic in ("terrace", "commodity"):
            with self.subTest(nic=nic):
                self.run_with("--nic", nic)


if __name__ == "__main__":
    unittest.main()
