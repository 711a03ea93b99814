"""Private memory larger than the budget: it moves into a swap file when it is registered, is paged, and is private again."""

import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from support import (ALL, LOCAL_WRITE, MW_BIND, ON_DEMAND, REM_ACCESS_ERR, REM_OP_ERR, SUCCESS, TERRACE, NegativeTest, connect,
                     fresh_address)
from test_paged import BYTES, MIB, OWN_FAILURE, PAGE, PROT_READ, USAGE, Limited, Paged


def is_refused():
    """Whether this user may not page private memory of programs with threads: see `terrace doctor`. Root may."""
    if os.geteuid() == 0:
        return False
    shown = subprocess.run([TERRACE, "doctor", "--json"], capture_output=True, text=True, timeout=60)
    return any(check["name"] == "userfaultfd" and check["state"] != "ok" for check in json.loads(shown.stdout)["checks"])


class Private(Paged):
    """A server with private memory of four times its budget."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if is_refused():
            raise unittest.SkipTest("needs root, or userfaultfd for faults of system calls (terrace doctor)")

    def setUp(self):
        # A name of its own, on a disk.
        self.swap = self.enterContext(tempfile.TemporaryDirectory(dir="/var/tmp"))
        self.options = ("--dram", "2M", "--swap", self.swap)
        super().setUp()

    def private(self, name="r", size=BYTES, access=ALL):
        region = self.server.mr(name, "anon", size, access)
        self.assertIn(region["addr"], self.tiered_regions(), "the memory is not paged")
        return region

    def swap_mappings(self):
        """The lines of the server's list of mappings that are shared mappings of swap files."""
        lines = pathlib.Path(f"/proc/{self.server.pid}/maps").read_text().splitlines()
        return [line for line in lines if self.swap in line and " rw-s " in line]

    def expect_here(self, name, offset, size, seed, *words):
        """The server's own loads find the bytes of this seed."""
        self.assertEqual(self.server("check", name, offset, size, seed, *words)["differ"], 0)


class Access(Private):
    def test_both_ends_and_the_program_see_the_same_bytes(self):
        region = self.private()
        for number in range(8):
            self.write(region, number * MIB + 5, 3 * PAGE, number)
            self.server("fill", "r", number * MIB + 5 * PAGE, 400_000, number, "from=0")
        for number in range(8):
            self.expect_content(region, number * MIB + 5, 3 * PAGE, number)
            self.expect_content(region, number * MIB + 5 * PAGE, 400_000, number)
            self.expect_here("r", number * MIB + 5, 3 * PAGE, number, "from=0")
        self.expect("add", region, 3 * MIB + 8, 8)
        self.expect("read", region, BYTES - 4, 8, REM_ACCESS_ERR)
        shown = self.server.stat()["memory"]
        self.assertLessEqual(shown["resident_bytes"], 2 * MIB)
        self.assertGreater(shown["regions"][0]["evictions"], 100)
        self.assertEqual(os.listdir(self.swap), [], "swap files have no names")

    def test_what_was_there_before_it_was_registered(self):
        self.server("map", "plain", "anon", BYTES)
        self.server("fill", "plain", 0, BYTES - PAGE, 3)
        region = self.server("submr", "r", "plain", 100, BYTES - 200, ALL)
        self.assertEqual(list(self.tiered_regions().values()), [BYTES])
        self.expect_here("plain", 0, BYTES - PAGE, 3)
        for offset in range(0, BYTES - 2 * PAGE, MIB):
            self.client("fill", "m", 0, PAGE, 4)
            self.expect("read", region, offset, PAGE)
            self.assertEqual(self.client("check", "m", 0, PAGE, 3, f"from={offset + 100}")["differ"], 0)
        self.server("dereg", "r")
        self.expect_here("plain", 0, BYTES - PAGE, 3)
        self.assertEqual(self.server("word", "plain", BYTES - 8)["value"], 0)
        # It stays paged, for the next time.
        paged = self.tiered_regions()
        mappings = self.swap_mappings()
        again = self.server("submr", "again", "plain", MIB, 2 * MIB, ALL)
        self.assertEqual((self.tiered_regions(), self.swap_mappings()), (paged, mappings))
        self.expect_content_from("plain", again, MIB)

    def expect_content_from(self, name, region, offset):
        self.client("fill", "m", 0, PAGE, 99)
        self.expect("read", region, 0, PAGE)
        self.assertEqual(self.client("check", "m", 0, PAGE, 3, f"from={offset}")["differ"], 0, name)

    def test_regions_of_the_same_memory_share_its_pages(self):
        whole = self.private()
        part = self.server("submr", "part", "r", 12345, 3 * MIB, ALL)
        self.assertEqual(self.tiered_regions(), {whole["addr"]: BYTES})
        self.write(part, MIB, PAGE, 5)
        self.expect_content(whole, 12345 + MIB, PAGE, 5)
        self.server("dereg", "r")
        self.assertEqual(self.tiered_regions(), {whole["addr"]: BYTES})
        self.expect_content(part, MIB, PAGE, 5)
        self.server("dereg", "part")
        self.assertEqual(self.tiered_regions(), {whole["addr"]: BYTES})

    def test_memory_of_another_region_is_not_moved(self):
        """A peer's copy that has begun would write to pages that the memory has no longer."""
        self.server("map", "plain", "anon", 4 * MIB)
        part = self.server("submr", "part", "plain", MIB, MIB // 2, ALL)
        self.write(part, 0, PAGE, 1)
        whole = self.server("submr", "whole", "plain", 0, 4 * MIB, ALL)
        self.write(whole, 2 * MIB, PAGE, 2)
        self.expect_content(whole, 2 * MIB, PAGE, 2)
        self.expect_here("plain", MIB, PAGE, 1, "from=0")
        self.server("dereg", "whole")
        part = self.server("rereg", "part", "plain", MIB, 2 * MIB, ALL)
        self.write(part, MIB, PAGE, 3)
        self.expect_here("plain", 2 * MIB, PAGE, 3, "from=0")
        self.assertEqual((self.tiered_regions(), self.swap_mappings()), ({}, []))
        self.server("dereg", "part")
        self.server("submr", "whole", "plain", 0, 4 * MIB, ALL)
        self.assertEqual(len(self.swap_mappings()), 1)
        self.expect_here("plain", MIB, PAGE, 1, "from=0")

    def test_small_and_shared_memory_is_not_moved(self):
        self.server.mr("small", "anon", MIB - 1)
        self.server.mr("memfd", "memfd", 4 * MIB)
        self.server.mr("file", "file", 4 * MIB, ALL, self.path)
        self.assertEqual(self.tiered_regions(), {})
        self.assertEqual(self.server.error_output(), "nothing on standard error")


class Changes(Private):
    def test_discarded(self):
        region = self.private()
        self.write(region, 0, MIB, 1)
        for first, how in ((PAGE, "dontneed"), (17 * PAGE, "free")):
            self.server("discard", "r", first, 4 * PAGE, how)
            self.assertEqual(self.server("word", "r", first)["value"], 0)
            self.client("fill", "m", 0, 4 * PAGE, 9)
            self.expect("read", region, first, 4 * PAGE)
            self.assertEqual(self.client("word", "m", 0)["value"], 0)
        self.expect_content(region, 0, PAGE, 1)

    def test_a_file_that_is_moved_to_its_place_keeps_its_bytes(self):
        """Memory that is given up becomes a hole of its swap file: not of a file that the program has mapped there."""
        size, path = 2 * MIB, pathlib.Path(self.swap) / "own"
        region = self.private(size=size)
        self.server("dereg", "r")
        self.server("map", "own", "file", size, path)
        self.server("fill", "own", 0, size, 5)
        self.server("move", "own", region["addr"])
        self.server("discard", "own", 0, size, "dontneed")
        self.expect_here("own", 0, size, 5)
        self.assertNotIn(bytes(64), path.read_bytes())

    def test_discarded_wherever_it_is(self):
        self.server("map", "r", "anon", 2 * MIB)
        self.server("fill", "r", 0, 2 * MIB, 4)
        region = self.server("submr", "m", "r", 0, 2 * MIB, ALL)
        self.server("dereg", "m")

        def expect_zeros(name, offset, how):
            self.server("discard", name, offset, PAGE, how)
            self.assertEqual(self.server("word", name, offset)["value"], 0)

        with self.assertRaises(OSError):
            self.server("move", "r", region["addr"] + 1)
        expect_zeros("r", PAGE, "dontneed")
        self.server("unmap", "r", 8 * PAGE, PAGE)
        expect_zeros("r", 16 * PAGE, "free")
        moved = self.server("lengthen", region["addr"], 4 * PAGE, 3 * MIB)["addr"]
        self.server("mapped", "n", moved, 3 * MIB)
        expect_zeros("n", 3 * PAGE, "dontneed")
        self.expect_here("n", 2 * PAGE, PAGE, 4)

    def test_discarded_after_many_others_were_registered(self):
        """Beyond 128 ranges that are not registered, all of them become private."""
        self.server("map", "plain", "anon", 130 * MIB)
        self.server("fill", "plain", 0, PAGE, 2)
        for number in range(130):
            self.server("submr", "m", "plain", number * MIB, MIB, ALL)
            self.server("dereg", "m")
        self.assertLess(len(self.swap_mappings()), 128)
        self.server("discard", "plain", 0, PAGE, "dontneed")
        self.assertEqual(self.server("word", "plain", 0)["value"], 0)

    def test_unmapped_and_mapped_again_without_notice(self):
        """As free() and malloc() of the C library do, which unmap and map memory by themselves."""
        region = self.private(size=4 * MIB)
        self.write(region, 0, PAGE, 1)
        self.server("dereg", "r")
        again = self.server("replace", region["addr"], 4 * MIB)["addr"]
        self.assertEqual(again, region["addr"])
        self.server("mapped", "n", again, 4 * MIB)
        self.server("fill", "n", 0, 4 * MIB, 8)
        # The memory of another region needs the budget.
        self.private("o")
        self.server("fill", "o", 0, BYTES, 9)
        time.sleep(0.5)
        self.expect_here("n", 0, 4 * MIB, 8)
        moved = self.server("submr", "m", "n", 0, 4 * MIB, ALL)
        self.assertEqual(len(self.tiered_regions()), 2)
        self.expect_here("n", 0, 4 * MIB, 8)
        self.write(moved, 77, PAGE, 3)
        self.expect_content(moved, 77, PAGE, 3)

    def test_protected_and_deregistered(self):
        region = self.private()
        self.write(region, 0, 4 * PAGE, 1)
        self.server("map", "plain", "anon", PAGE)
        self.server("protect", "r", PAGE, PAGE, PROT_READ)
        self.expect("write", region, PAGE, 8, REM_ACCESS_ERR)
        address = self.server.mr("n", "anon", BYTES)["addr"]
        self.server("mapped", "same", region["addr"], BYTES)
        self.server("dereg", "r")
        rights = [line.split()[1] for line in pathlib.Path(f"/proc/{self.server.pid}/maps").read_text().splitlines()
                  if line.startswith(f"{region['addr'] + PAGE:x}-")]
        self.assertEqual(rights, ["r--p"], "what the program has protected stays protected")
        self.expect_here("same", 0, 4 * PAGE, 1)
        self.assertIn(address, self.tiered_regions())

    def test_memory_of_the_allocator(self):
        """A block in the heap, whose pages have the allocator's own data, while other threads allocate."""
        heap = self.start(None, *self.options, inner_wrapper=["env", "GLIBC_TUNABLES=glibc.malloc.mmap_max=0"])
        connect(self.client, "h", heap, "h")
        heap("storm", 2)
        for number in range(20):
            region = heap.mr(f"h{number}", "malloc", 2 * MIB + number * 4321)
            self.client("fill", "m", 0, PAGE, number)
            for offset in (0, MIB + 77, 2 * MIB - PAGE):
                self.client("post", "h", "write", 1, "m", 0, PAGE, region["addr"] + offset, region["rkey"])
                self.assertEqual(self.client.status("h"), SUCCESS)
                self.assertEqual(heap("check", f"h{number}", offset, PAGE, number, "from=0")["differ"], 0)
            if number % 2:
                heap("dereg", f"h{number}")
        # Blocks that share a page with memory that has moved stay where they are.
        self.assertGreater(len(heap.stat()["memory"]["regions"]), 0)

    def test_lengthened_after_it_was_registered(self):
        region = self.private(size=2 * MIB)
        self.server("fill", "r", 0, 2 * MIB, 4)
        self.server("dereg", "r")
        moved = self.server("lengthen", region["addr"], 2 * MIB, 6 * MIB)["addr"]
        self.server("mapped", "n", moved, 6 * MIB)
        self.expect_here("n", 0, 2 * MIB, 4)
        again = self.server("submr", "again", "n", 0, 6 * MIB, ALL | ON_DEMAND)
        self.write(again, 4 * MIB, PAGE, 5)
        self.expect_content(again, 4 * MIB, PAGE, 5)
        child = self.server("fork", "_exit")["pid"]
        self.assertEqual(self.server("reap", child), [])
        self.expect_here("n", 0, 2 * MIB, 4)
        self.write(again, 3 * MIB, PAGE, 6)
        self.server("word", "n", 3 * MIB + PAGE, 1234)
        self.expect_content(again, 3 * MIB, PAGE, 6)
        self.expect_here("n", 0, 2 * MIB, 4)

    def test_shortened_and_lengthened_again(self):
        self.server("map", "r", "anon", 4 * MIB)
        self.server("fill", "r", 0, 4 * MIB, 4)
        region = self.server("submr", "m", "r", 0, 4 * MIB, ALL)
        self.server("dereg", "m")
        shorter = self.server("remap", region["addr"], 4 * MIB, 2 * MIB - 100)["addr"]
        longer = self.server("remap", shorter, 2 * MIB - 100, 4 * MIB)["addr"]
        self.server("mapped", "n", longer, 4 * MIB)
        self.expect_here("n", 0, 2 * MIB, 4)
        for offset in (2 * MIB, 3 * MIB, 4 * MIB - 8):
            self.assertEqual(self.server("word", "n", offset)["value"], 0)

    def test_unmapped(self):
        region = self.private()
        self.write(region, 0, PAGE, 1)
        self.server("unmap", "r", 4 * MIB, MIB)
        self.assertEqual(self.tiered_regions(), {})
        self.expect("read", region, 4 * MIB, 8, REM_ACCESS_ERR)
        self.expect_content(region, 0, PAGE, 1)
        self.server("dereg", "r")
        self.assertEqual(self.swap_mappings(), [])

    def test_children_do_not_have_it(self):
        region = self.private()
        self.write(region, 0, PAGE, 1)
        child = self.server("fork", "exec")["pid"]
        self.assertEqual(self.server("reap", child), [])
        child = self.server("fork", "_exit", "r")["pid"]
        with self.assertRaises(OSError) as status:
            self.server("reap", child)
        self.assertEqual(status.exception.errno, signal.SIGSEGV)
        self.expect_content(region, 0, PAGE, 1)
        self.server("map", "plain", "anon", BYTES)
        self.server("fill", "plain", 0, BYTES, 2)
        self.server("submr", "p", "plain", 0, BYTES, ALL)
        self.server("dereg", "p")
        child = self.server("fork", "_exit", "plain")["pid"]
        self.assertEqual(self.server("reap", child), [], "memory that is not registered is inherited")
        self.expect_here("plain", 0, BYTES, 2)
        self.assertEqual(self.tiered_regions(), {region["addr"]: BYTES})
        for offset, how in ((PAGE, "dontneed"), (9 * PAGE, "free")):
            self.server("discard", "plain", offset, 4 * PAGE, how)
            self.assertEqual(self.server("word", "plain", offset)["value"], 0, how)
            self.expect_here("plain", offset + 4 * PAGE, 4 * PAGE, 2)
        ordinary = self.server("submr", "q", "plain", 0, BYTES, ALL)
        self.write(ordinary, 5, PAGE, 6)
        self.expect_content(ordinary, 5, PAGE, 6)

    def test_children_have_what_is_not_registered_when_no_descriptor_is_left(self):
        self.server("map", "plain", "anon", BYTES)
        self.server("fill", "plain", 0, BYTES, 2)
        self.server("submr", "p", "plain", 0, BYTES, ALL)
        self.server("dereg", "p")
        used = {int(number) for number in os.listdir(f"/proc/{self.server.pid}/fd")}
        _, hard = resource.prlimit(self.server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self.server.pid, resource.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), hard))
        for _ in range(2):
            child = self.server("fork", "_exit", "plain")["pid"]
            self.assertEqual(self.server("reap", child), [])
        self.expect_here("plain", 0, BYTES, 2)
        self.server("discard", "plain", PAGE, PAGE, "dontneed")
        self.assertEqual(self.server("word", "plain", PAGE)["value"], 0)

    def test_killed(self):
        self.private(size=64 * MIB)
        self.server("fill", "r", 0, 64 * MIB, 1)
        used = os.statvfs(self.swap)
        self.server.kill()

        def is_free():
            now = os.statvfs(self.swap)
            return (now.f_bfree - used.f_bfree) * now.f_frsize > -32 * MIB

        self.eventually(is_free, "the swap file's space is free")
        self.assertEqual(os.listdir(self.swap), [])


class SlowDisk(Private):
    """A page that is read into memory takes half a second."""

    def setUp(self):
        slow = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "slow.toml"
        slow.write_text('[[fault]]\nkind = "slow-storage"\noperation = "read"\ndelay_us_min = 500000\n')
        self.plan = ("--fault-plan", slow)
        super().setUp()

    def start(self, address=None, *options, **keywords):
        return super().start(address, *options, *(self.plan if options else ()), **keywords)

    def write_to_absent_page(self, by_window=False):
        """A peer WRITEs to a page that is not in memory, which is being read. Returns the key that the WRITE has."""
        self.server("map", "plain", "anon", 4 * MIB)
        self.server("fill", "plain", 0, 4 * MIB, 9)
        region = self.server("submr", "r", "plain", 0, 4 * MIB, ALL | MW_BIND)
        rkey = region["rkey"]
        if by_window:
            self.server("mw", "w")
            rkey = self.server("bind", "q", 1, "w", "r", 0, 4 * MIB, ALL & ~LOCAL_WRITE)["rkey"]
            self.assertEqual(self.server.status("q"), SUCCESS)
        self.server("pageout", "plain", 0, 4 * MIB)
        memory = lambda: self.server.stat()["memory"]
        self.eventually(lambda: memory()["resident_bytes"] < MIB, "pages leave")
        self.client("fill", "m", 0, PAGE, 1)
        self.client("post", "q", "write", 1, "m", 0, PAGE, region["addr"], rkey)
        self.eventually(lambda: memory()["io_in_flight"] > 0, "the page is read")
        return rkey

    def expect_no_write(self):
        """The page's read ends, and the program's bytes stay."""
        self.server("fill", "plain", 0, PAGE, 2)
        self.eventually(lambda: self.server.stat()["memory"]["io_in_flight"] == 0, "the page has been read")
        self.expect_here("plain", 0, PAGE, 2)

    def expect_no_write_behind(self, *control):
        self.write_to_absent_page()
        self.server(*control)
        self.expect_no_write()

    def test_no_write_comes_behind_a_deregistration(self):
        self.expect_no_write_behind("dereg", "r")

    def test_no_write_comes_behind_a_change_of_the_region(self):
        self.expect_no_write_behind("rereg", "r", "plain", MIB, MIB, ALL)

    def test_no_write_comes_behind_the_end_of_its_queue_pair(self):
        self.expect_no_write_behind("destroy", "q")

    def test_no_write_comes_behind_the_error_state(self):
        self.expect_no_write_behind("error", "q")

    def test_no_write_comes_behind_the_end_of_its_window(self):
        self.write_to_absent_page(by_window=True)
        self.server("dealloc", "w")
        self.expect_no_write()
        self.assertEqual(self.client.status("q"), REM_OP_ERR)

    def test_no_write_comes_behind_the_invalidation_of_its_window(self):
        self.write_to_absent_page(by_window=True)
        self.server("invalidate", "q", 2, "w")
        self.assertEqual(self.server.status("q"), SUCCESS)
        self.expect_no_write()
        self.assertEqual(self.client.status("q"), REM_OP_ERR)

    def test_a_write_comes_before_the_invalidation_that_its_peer_sends_behind_it(self):
        rkey = self.write_to_absent_page(by_window=True)
        self.server.mr("in", "anon", PAGE)
        self.server("recv", "q", 2, "in", 0, 64)
        self.client("post", "q", "send_inv", 2, "m", 0, 8, 0, 0, f"inv={rkey}")
        self.assertEqual(self.client.poll("q", 2), [(1, SUCCESS), (2, SUCCESS)])
        self.assertEqual(self.server.status("q"), SUCCESS)
        self.expect_here("plain", 0, PAGE, 1)


class Budget(Limited):
    def setUp(self):
        self.options = ("--swap", self.enterContext(tempfile.TemporaryDirectory(dir="/var/tmp")))
        super().setUp()

    def test_a_program_fills_ten_times_its_memory(self):
        size = 1024 * MIB
        region = self.server.mr("r", "anon", size)
        self.server("fill", "r", 0, size, 7)
        for offset in range(0, size, 7 * MIB):
            self.check(region, offset, 2 * PAGE, 7)
        self.assertEqual(self.server("check", "r", size - 64 * MIB, 64 * MIB, 7, timeout_s=60)["differ"], 0)
        shown = self.server.stat()["memory"]
        self.assertLessEqual(shown["resident_bytes"], self.DRAM_MIB * MIB)


@unittest.skipUnless(os.geteuid() == 0 and shutil.which("mkfs.ext4"), "needs root and mkfs.ext4")
class FullDisk(NegativeTest):
    """Memory of 32 MiB with a swap file on a disk of 16."""

    def setUp(self):
        directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(dir="/var/tmp")))
        image, disk = directory / "image", directory / "disk"
        disk.mkdir()
        with open(image, "wb") as file:
            file.truncate(16 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-m0", image], check=True)
        mounted = subprocess.run(["mount", "-o", "loop", image, disk], capture_output=True, text=True, check=False)
        if mounted.returncode != 0:
            self.skipTest(f"cannot mount an image: {mounted.stderr}")
        self.addCleanup(subprocess.run, ["umount", disk], check=True)
        self.client, self.server = self.start(), self.start(None, "--dram", "2M", "--swap", str(disk))
        self.client.mr("m", "anon", MIB)
        connect(self.client, "q", self.server, "q")
        self.region = self.server.mr("r", "anon", 32 * MIB)

    def test_peers_get_an_error_and_what_was_written_stays(self):
        self.client("fill", "m", 0, MIB, 1)
        statuses = []
        for number in range(32):
            self.client("post", "q", "write", 1, "m", 0, MIB, self.region["addr"] + number * MIB, self.region["rkey"])
            statuses.append(self.client.status("q", timeout_s=30))
            if statuses[-1] != SUCCESS:
                break
        self.assertEqual(statuses[-1], REM_OP_ERR)
        self.assertGreater(len(statuses), 4)
        self.client("destroy", "q")
        self.server("destroy", "q")
        for end in (self.client, self.server):
            del end.qpns["q"]
        connect(self.client, "q", self.server, "q")
        for number in range(len(statuses) - 1):
            self.client("fill", "m", 0, MIB, 2)
            self.client("post", "q", "read", 1, "m", 0, MIB, self.region["addr"] + number * MIB, self.region["rkey"])
            self.assertEqual(self.client.status("q", timeout_s=30), SUCCESS)
            self.assertEqual(self.client("check", "m", 0, MIB, 1)["differ"], 0)

    def test_the_program_is_told_why_it_ends(self):
        self.server.send("fill", "r", 0, 32 * MIB, 1)
        self.assertEqual(self.server.process.wait(30), -signal.SIGBUS)
        self.server.kill()
        self.assertIn("the disk of --swap is full", self.server.error_output())


class Options(unittest.TestCase):
    def run_true(self, *options):
        return subprocess.run([TERRACE, "run", "--addr", fresh_address(), *options, "--", "true"], capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=20)

    def test_directories_that_cannot_have_swap_files(self):
        for options, status, said in (
                (("--dram", "2M", "--swap", "/dev/null/x"), OWN_FAILURE, "/dev/null/x: cannot create a swap file"),
                (("--dram", "2M", "--swap", "/dev/shm"), OWN_FAILURE, "choose a directory on a disk"),
                (("--swap", "/var/tmp"), USAGE, "--swap needs --dram"),
                (("--dram", "2M", "--mode", "odp", "--swap", "/var/tmp"), USAGE, "no other --mode than wait")):
            outcome = self.run_true(*options)
            self.assertEqual((outcome.returncode, outcome.stderr.count("\n")), (status, 1), outcome.stderr)
            self.assertIn(said, outcome.stderr)

    def test_none(self):
        outcome = self.run_true("--dram", "2M", "--swap", "none")
        self.assertEqual((outcome.returncode, outcome.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
