"""Regions larger than memory in unmodified programs: registrations that cannot be tiered to a file, mappings that
change or are shared, and impossible budgets."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import pathlib
import resource
import shutil
import subprocess
import tempfile
import time
import unittest

from support import (ALL, ERR, LOCAL_WRITE, ON_DEMAND, REM_ACCESS_ERR, REMOTE_READ, REMOTE_WRITE, SUCCESS, TERRACE, NegativeTest,
                     connect, fresh_address)

from harness import cgroup  # noqa: E402  (support has set the path)

PAGE, MIB = 4096, 1 << 20
PROT_NONE, PROT_READ = 0, 1
BYTES = 8 * MIB
OWN_FAILURE, USAGE = 125, 2


class Paged(NegativeTest):
    """A server with a budget of a quarter of the region, and a client with a connection to it."""

    options = ("--dram", "2M")

    def setUp(self):
        self.directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.path = self.directory / "data"
        self.client, self.server = self.start(), self.start(None, *self.options)
        self.client.mr("m", "anon", MIB)
        self.witness = self.server.mr("w", "anon", PAGE)
        connect(self.client, "q", self.server, "q")
        connect(self.client, "witness", self.server, "witness")

    def tiered(self, name="r", size=BYTES, access=ALL, kind="file"):
        region = self.server.mr(name, kind, size, access | ON_DEMAND, self.path)
        self.assertIn(region["addr"], self.tiered_regions(), "the region is not tiered to its file")
        return region

    def tiered_regions(self):
        """Address to length of the regions that are tiered to files."""
        memory = self.server.stat().get("memory") or {"regions": []}
        return {region["addr"]: region["len_bytes"] for region in memory["regions"]}

    def expect(self, operation, region, offset, size, status=SUCCESS, local=0):
        """One operation on a region of the server ends with `status`. After an error the queue pair is replaced."""
        self.client("post", "q", operation, 1, "m", local, size, region["addr"] + offset, region["rkey"])
        self.assertEqual(self.client.status("q"), status, f"{operation} of {size} at {offset}")
        if status != SUCCESS:
            for end in (self.client, self.server):
                self.assertEqual(end("state", "q")["state"], ERR)
                end("destroy", "q")
                del end.qpns["q"]
            connect(self.client, "q", self.server, "q")
        self.client("post", "witness", "read", 2, "m", MIB - 64, 64, self.witness["addr"], self.witness["rkey"])
        self.assertEqual(self.client.status("witness"), SUCCESS)

    def write(self, region, offset, size, seed):
        self.client("fill", "m", 0, size, seed)
        self.expect("write", region, offset, size)

    def expect_content(self, region, offset, size, seed):
        """A READ returns the bytes of this seed."""
        self.client("fill", "m", 0, size, seed + 1)
        self.expect("read", region, offset, size)
        self.assertEqual(self.client("check", "m", 0, size, seed)["differ"], 0)


class VanishingFiles(Paged):
    def test_truncated_while_tiered(self):
        region = self.tiered()
        self.write(region, 0, 64 * PAGE, 1)
        self.write(region, 5 * MIB, 64 * PAGE, 2)
        self.server("truncate", "r", 4 * MIB + 100)
        for operation, offset, size in (("read", 5 * MIB, 8), ("write", 5 * MIB, 8), ("add", 5 * MIB, 8), ("read", 5 * MIB, MIB),
                                        ("write", 4 * MIB - 8, MIB), ("write", BYTES - 100, 100)):
            self.expect(operation, region, offset, size, REM_ACCESS_ERR)
        self.assertEqual(self.path.stat().st_size, 4 * MIB + 100, "a failed WRITE extended the file")
        self.expect_content(region, 0, 64 * PAGE, 1)
        self.server("truncate", "r", BYTES)
        self.write(region, 5 * MIB, 64 * PAGE, 3)
        self.expect_content(region, 5 * MIB, 64 * PAGE, 3)

    def test_truncated_to_nothing_and_deregistered(self):
        region = self.tiered()
        self.server("truncate", "r", 0)
        self.expect("read", region, 0, PAGE, REM_ACCESS_ERR)
        self.server("dereg", "r")
        self.assertEqual(self.tiered_regions(), {})

    def test_deleted_and_its_descriptor_closed(self):
        region = self.tiered()
        self.path.unlink()
        self.server("close", "r")
        self.write(region, 3 * MIB - 5, 2 * PAGE, 4)
        self.expect_content(region, 3 * MIB - 5, 2 * PAGE, 4)

    def test_locks_of_the_program_survive(self):
        self.path.write_bytes(bytes(BYTES))
        with open(self.path, "rb+") as file:
            self.tiered()
            self.server("lock", "r")
            self.server("dereg", "r")
            self.assertEqual(self.tiered_regions(), {})
            with self.assertRaises(BlockingIOError):
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_locks_of_the_program_survive_a_registration_that_is_not_tiered(self):
        self.server.mr("r", "file", BYTES, ALL, self.path)
        self.server("lock", "r")
        self.server("truncate", "r", BYTES - MIB)
        # The mapping is longer than the file.
        self.server("submr", "s", "r", 0, BYTES, ALL | ON_DEMAND)
        self.assertEqual(self.tiered_regions(), {})
        with open(self.path, "rb+") as file, self.assertRaises(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class ChangingMappings(Paged):
    def test_unmapped(self):
        region = self.tiered()
        self.write(region, 0, PAGE, 1)
        self.server("unmap", "r", 4 * MIB, MIB)
        self.assertEqual(self.tiered_regions(), {})
        self.assertIn("ordinary", self.server.error_output())
        for operation in ("read", "write", "add"):
            self.expect(operation, region, 4 * MIB, 8, REM_ACCESS_ERR)
        self.expect("read", region, 4 * MIB - PAGE, 2 * PAGE, REM_ACCESS_ERR)
        self.expect_content(region, 0, PAGE, 1)
        self.write(region, 6 * MIB, PAGE, 2)
        self.expect_content(region, 6 * MIB, PAGE, 2)
        self.server("dereg", "r")

    def test_protected(self):
        region = self.tiered()
        self.server("protect", "r", 0, PAGE, PROT_NONE)
        self.server("protect", "r", PAGE, PAGE, PROT_READ)
        self.expect("read", region, 0, 8, REM_ACCESS_ERR)
        self.expect("write", region, PAGE, 8, REM_ACCESS_ERR)
        self.expect("read", region, PAGE, 8)
        self.write(region, 2 * PAGE, PAGE, 3)

    def test_changes_of_other_mappings_have_no_effect(self):
        region = self.tiered()
        self.server.mr("other", "file", BYTES, ALL, self.directory / "other")
        self.server("unmap", "other", 0, BYTES)
        self.assertEqual(self.tiered_regions(), {region["addr"]: BYTES})

    def test_in_the_middle_of_traffic(self):
        """The mapping changes during READs and WRITEs of all of it, which continue with correct data."""
        region = self.tiered()
        for number in range(5):
            self.client.mr(f"s{number}", "anon", 2 << 14)
            connect(self.client, f"s{number}", self.server, f"s{number}")
            self.client("stream", f"s{number}", f"s{number}", region["addr"] + number * MIB, region["rkey"])
        time.sleep(1)
        self.server("unmap", "r", 7 * MIB, MIB)
        time.sleep(1)
        for number in range(5):
            result = self.client("stop", f"s{number}")
            self.assertEqual((result["wrong"], result["status"]), (0, SUCCESS))
            self.assertGreater(result["rounds"], 2)
        self.assertEqual(self.tiered_regions(), {})


class Sharing(Paged):
    def test_regions_of_one_mapping_share_its_memory(self):
        whole = self.tiered()
        odd = self.server("submr", "odd", "r", 12345, 3 * MIB + 1, ALL | ON_DEMAND)
        ordinary = self.server("submr", "plain", "r", PAGE, 3 * MIB, ALL)
        self.assertEqual(self.tiered_regions(), {whole["addr"]: BYTES})
        self.write(odd, MIB - 77, 5 * PAGE, 6)
        self.expect_content(whole, 12345 + MIB - 77, 5 * PAGE, 6)
        self.expect_content(ordinary, 12345 + MIB - 77 - PAGE, 5 * PAGE, 6)
        self.server("dereg", "r")
        self.assertEqual(self.tiered_regions(), {whole["addr"]: BYTES})
        self.expect_content(odd, MIB - 77, 5 * PAGE, 6)
        self.expect("read", odd, 3 * MIB - 7, 9, REM_ACCESS_ERR)
        self.server("dereg", "odd")
        self.assertEqual(self.tiered_regions(), {})
        self.expect_content(ordinary, 12345 + MIB - 77 - PAGE, 5 * PAGE, 6)

    def test_moved(self):
        region = self.tiered()
        self.path = self.directory / "other"
        other = self.tiered("o")
        self.server.mr("a", "anon", MIB - PAGE)
        self.write(region, 0, PAGE, 1)
        moved = self.server("rereg", "r", "o", 5 * PAGE + 3, MIB, ALL | ON_DEMAND)
        self.assertEqual(self.tiered_regions(), {other["addr"]: BYTES})
        self.write(moved, 0, PAGE, 2)
        self.expect_content(other, 5 * PAGE + 3, PAGE, 2)
        moved = self.server("rereg", "r", "a", 0, MIB - PAGE, ALL)
        self.write(moved, 0, PAGE, 3)
        self.assertEqual(self.server("check", "a", 0, PAGE, 3)["differ"], 0)
        self.server("dereg", "o")
        self.assertEqual(self.tiered_regions(), {})
        self.assertEqual((self.directory / "data").read_bytes()[:1], bytes([self.first_byte(1)]))

    def first_byte(self, seed):
        self.client.mr("first", "file", PAGE, ALL, self.directory / "first")
        self.client("fill", "first", 0, PAGE, seed)
        return (self.directory / "first").read_bytes()[0]

    def test_other_memory_stays_ordinary(self):
        self.server.mr("anon", "anon", MIB - PAGE, ALL | ON_DEMAND)
        self.server.mr("plain", "file", MIB, ALL, self.path)
        with contextlib.suppress(OSError):
            self.server.mr("huge", "huge", 2 * MIB, ALL | ON_DEMAND)
        self.assertEqual(self.tiered_regions(), {})
        # These registrations are valid, so the library does not log them.
        self.assertEqual(self.server.error_output(), "nothing on standard error")

    def test_the_mappings_of_a_child_are_its_own(self):
        region = self.tiered()
        self.write(region, 0, PAGE, 1)
        for how in ("_exit", "exit", "exec"):
            child = self.server("fork", how)["pid"]
            self.write(region, MIB, PAGE, 2)
            self.assertEqual(self.server("reap", child), [])
            self.expect_content(region, MIB, PAGE, 2)
        self.assertEqual(self.tiered_regions(), {region["addr"]: BYTES})

    def test_a_daemon_registers_its_own_mappings(self):
        pid = self.server("fork", "daemon")["pid"]
        self.addCleanup(lambda: os.path.exists(f"/proc/{pid}") and os.kill(pid, 9))
        self.server.process.wait(5)
        self.server.pid = pid
        region = self.server.mr("d", "file", BYTES, ALL | ON_DEMAND, self.path)
        connect(self.client, "d", self.server, "d")
        self.client("fill", "m", 0, PAGE, 8)
        self.client("post", "d", "write", 1, "m", 0, PAGE, region["addr"], region["rkey"])
        self.assertEqual(self.client.status("d"), SUCCESS)
        self.assertEqual(self.server("check", "d", 0, PAGE, 8)["differ"], 0)
        self.assertEqual(self.tiered_regions(), {region["addr"]: BYTES})


class Limited(NegativeTest):
    """A server in a control group of its budget and 80 MiB, and a client with a connection to it."""

    DRAM_MIB = 32
    options = ()

    def setUp(self):
        try:
            limit = (self.DRAM_MIB + 80) * MIB
            self.group = self.enterContext(cgroup.memory_group(f"terrace-negative-{os.getpid()}", limit))
        except cgroup.Unavailable as unavailable:
            self.skipTest(str(unavailable))
        self.client = self.start()
        options = ("--dram", f"{self.DRAM_MIB}M", *self.options)
        self.server = self.start(None, *options, wrapper=self.group.argv([]))
        self.client.mr("m", "anon", MIB)
        connect(self.client, "q", self.server, "q")

    def check(self, region, offset, size, seed):
        self.client("post", "q", "read", 1, "m", 0, size, region["addr"] + offset, region["rkey"])
        self.assertEqual(self.client.status("q"), SUCCESS)
        self.assertEqual(self.client("check", "m", 0, size, seed, f"from={offset}")["differ"], 0)


class Memory(Limited):
    """The page cache of a file."""

    def setUp(self):
        self.path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "data"
        super().setUp()

    def shown(self):
        (region,) = self.server.stat()["memory"]["regions"]
        return region

    def test_a_program_that_fills_its_mapping_before_it_registers_it(self):
        size = 256 * MIB
        self.server.mr("plain", "file", size, ALL, self.path)
        self.server("fill", "plain", 0, size, 7)
        region = self.server("submr", "r", "plain", 0, size, ALL | ON_DEMAND)
        for offset in range(0, size, 3 * MIB):
            self.check(region, offset, 2 * PAGE, 7)
        self.eventually(lambda: cached_bytes(self.path) <= self.DRAM_MIB * MIB, "the budget is kept", 30)
        self.assertLessEqual(self.shown()["resident_bytes"], self.DRAM_MIB * MIB)
        self.check(region, size - PAGE, PAGE, 7)

    def test_a_mapping_of_64_gib(self):
        size = 64 << 30
        region = self.server.mr("r", "file", size, ALL | ON_DEMAND, self.path)
        for number in range(300):
            offset = number * (size // 301) // PAGE * PAGE
            self.client("fill", "m", 0, PAGE, number, f"from={offset}")
            self.client("post", "q", "write", 1, "m", 0, PAGE, region["addr"] + offset, region["rkey"])
            self.assertEqual(self.client.status("q"), SUCCESS)
            self.check(region, offset, PAGE, number)
        mappings = pathlib.Path(f"/proc/{self.server.pid}/maps").read_text().count(str(self.path))
        self.assertEqual(mappings, 1, "hot pages cut the mapping")


def cached_bytes(path):
    """The bytes of a file in the page cache, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb+") as file, mmap.mmap(file.fileno(), 0) as memory:
        page_count = len(memory) // PAGE
        pages = (ctypes.c_ubyte * page_count)()
        anchor = ctypes.c_ubyte.from_buffer(memory)
        result = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(memory)), pages)
        del anchor
        assert result == 0, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in pages) * PAGE


class Permissions(Paged):
    def test_a_read_only_mapping(self):
        self.path.write_bytes(bytes(BYTES))
        region = self.tiered(kind="readonly")
        self.expect("read", region, 1, 3 * PAGE)
        for operation, size in (("write", 8), ("write", MIB), ("add", 8)):
            self.expect(operation, region, 3 * MIB, size, REM_ACCESS_ERR)
        self.assertEqual(self.path.read_bytes(), bytes(BYTES))

    def test_access_that_was_not_granted(self):
        region = self.tiered(access=LOCAL_WRITE | REMOTE_READ)
        self.expect("write", region, 0, 8, REM_ACCESS_ERR)
        self.server.mr("w2", "file", BYTES, LOCAL_WRITE | REMOTE_WRITE | ON_DEMAND, self.path)
        self.expect("read", region, BYTES - 4, 8, REM_ACCESS_ERR)
        self.expect("read", region, BYTES - 4, 4)

    def test_a_file_without_a_last_page(self):
        self.path.write_bytes(bytes(5 * PAGE + 77))
        region = self.tiered(size=5 * PAGE + 77)
        self.write(region, 4 * PAGE + 1, PAGE + 76, 9)
        self.expect_content(region, 4 * PAGE + 1, PAGE + 76, 9)
        self.assertEqual(self.path.stat().st_size, 5 * PAGE + 77)


def may_lock(size):
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return os.geteuid() == 0 or limit == resource.RLIM_INFINITY or limit >= size


@unittest.skipUnless(may_lock(2 * BYTES), "needs root, or a limit of 16 MiB on locked memory (ulimit -l)")
class PinMode(Paged):
    options = ("--dram", "16M", "--mode", "pin")

    def test_the_mapping_is_locked(self):
        region = self.tiered()
        self.write(region, BYTES - PAGE - 1, PAGE, 5)
        self.expect_content(region, BYTES - PAGE - 1, PAGE, 5)
        (shown,) = self.server.stat()["memory"]["regions"]
        self.assertEqual(shown["resident_bytes"], BYTES)
        self.path = self.directory / "more"
        with self.assertRaises(OSError):
            self.server.mr("more", "file", 2 * BYTES, ALL | ON_DEMAND, self.path)
        self.assertIn("make the budget larger", self.server.error_output())
        self.server("dereg", "r")
        self.assertEqual(self.server.stat()["memory"]["resident_bytes"], 0)


class OdpMode(Paged):
    options = ("--dram", "2M", "--mode", "odp")

    def test_faults_get_rnr_naks(self):
        region = self.tiered()
        for number in range(8):
            self.write(region, number * MIB + 5, 3 * PAGE, number)
        for number in range(8):
            self.expect_content(region, number * MIB + 5, 3 * PAGE, number)
        self.assertGreater(self.server.counts("q")["rnr_naks_sent"], 0)
        self.expect("add", region, 3 * MIB, 8)
        self.server("unmap", "r", 4 * MIB, MIB)
        self.expect("read", region, 4 * MIB, 8, REM_ACCESS_ERR)
        self.expect_content(region, 7 * MIB + 5, 3 * PAGE, 7)


class Budgets(NegativeTest):
    def terrace(self, *arguments, wrapper=(), **variables):
        address = fresh_address()
        return subprocess.run([*wrapper, TERRACE, "run", "--addr", address, *arguments], capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, env={**os.environ, **variables}, timeout=20)

    def refused(self, said, *arguments, status=OWN_FAILURE, **keywords):
        outcome = self.terrace(*arguments, "--", "true", **keywords)
        self.assertEqual(outcome.returncode, status, outcome.stderr)
        self.assertTrue(outcome.stderr.startswith("terrace: "), outcome.stderr)
        self.assertEqual(outcome.stderr.count("\n"), 1, outcome.stderr)
        self.assertIn(said, outcome.stderr)

    def test_invalid_sizes(self):
        for size in ("0", "much", "-1", "1.5G", "5X", "99999999999999999999", " 1M"):
            with self.subTest(size):
                self.refused("such as 512M", f"--dram={size}", status=USAGE)
        self.refused("such as 512M", status=USAGE, TERRACE_DRAM="x")
        self.refused("--dram 512M", "--mode", "pin", status=USAGE)
        self.assertEqual(self.terrace("--dram", "1M", "--mode", "fast", "--", "true").returncode, 2)

    def test_more_than_physical_memory(self):
        self.refused("of memory that this machine has", "--dram", "100T")

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("setpriv"), "needs root and setpriv")
    def test_more_than_the_memlock_limit(self):
        wrapper = ("prlimit", "--memlock=8388608:8388608", "setpriv", "--bounding-set=-ipc_lock,-sys_resource",
                   "--inh-caps=-ipc_lock,-sys_resource")
        self.refused("ulimit -l", "--dram", "64M", "--mode", "pin", wrapper=wrapper)
        # Pages are not locked.
        for options in (("--dram", "64M"), ("--dram", "4M", "--mode", "pin")):
            outcome = self.terrace(*options, "--", "true", wrapper=wrapper)
            self.assertEqual(outcome.returncode, 0, outcome.stderr)

    def test_more_than_the_control_group_allows(self):
        try:
            group = self.enterContext(cgroup.memory_group(f"terrace-negative-{os.getpid()}", 64 * MIB))
        except cgroup.Unavailable as unavailable:
            self.skipTest(str(unavailable))
        self.refused("control group", "--dram", "128M", wrapper=group.argv([]))

    def test_the_library_prints_the_same_errors(self):
        """Programs started without `terrace run` get the same errors."""
        library = TERRACE.parents[1] / "lib/terrace/libibverbs.so.1"
        for value, said in (("x", "such as 512M"), ("100T", "of memory that this machine has")):
            variables = {**os.environ, "LD_PRELOAD": str(library), "TERRACE_ADDR": fresh_address(), "TERRACE_DRAM": value}
            outcome = subprocess.run(["ibv_devinfo"], env=variables, capture_output=True, text=True, timeout=20)
            self.assertNotEqual(outcome.returncode, 0)
            self.assertIn(said, outcome.stderr)

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("unshare"), "needs root and unshare")
    def test_without_proc(self):
        """Without /proc the region stays ordinary memory, and works."""
        hidden = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0"']
        with tempfile.TemporaryDirectory() as directory:
            client = self.start()
            server = self.start(None, "--dram", "2M", inner_wrapper=hidden)
            region = server.mr("r", "file", BYTES, ALL | ON_DEMAND, f"{directory}/data")
            self.assertIn("ordinary", server.error_output())
            client.mr("m", "anon", PAGE)
            connect(client, "q", server, "q")
            client("post", "q", "write", 1, "m", 0, PAGE, region["addr"] + MIB + 1, region["rkey"])
            self.assertEqual(client.status("q"), SUCCESS)


if __name__ == "__main__":
    unittest.main()
