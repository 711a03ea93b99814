"""Memory regions that are files: rights, lengths, changes of the layout, local use of their keys, full file systems."""

import errno
import os
import pathlib
import resource
import signal
import subprocess
import tempfile
import unittest

from support import (
    ALL, ERR, LOC_PROT_ERR, LOCAL_WRITE, REM_ACCESS_ERR, REM_OP_ERR, REMOTE_READ, REMOTE_WRITE, ROOT, SUCCESS,
    connect, fresh_address, procs)
from test_paged import MIB, PAGE, Paged

BYTES = 8 * MIB
# Directories on a disk and in memory.
DIRECTORIES = ("/var/tmp", "/dev/shm")


class Files(Paged):
    """A server with a file in a directory of its own, and a client with a connection to it."""

    options = ()

    def setUp(self):
        super().setUp()
        self.paths = [pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(dir=place))) / "file"
                      for place in DIRECTORIES]

    def file(self, path, size=BYTES, access=ALL, flags=os.O_RDWR, name="f", **extent):
        with open(path, "ab") as file:
            file.truncate(size)
        words = [f"{key}={value}" for key, value in extent.items()]
        return self.server("filemr", name, path, access, flags, *words)

    def files(self, **arguments):
        """A region of each file system, one after the other."""
        for path in self.paths:
            with self.subTest(path=str(path)):
                yield path, self.file(path, **arguments)
                self.server("dereg", "f")


class Access(Files):
    def test_peers_address_the_file_by_offset(self):
        for path, region in self.files():
            self.assertEqual(region["addr"], 0)
            for number in range(8):
                self.write(region, number * MIB + 5, 100_000, number)
            for number in range(8):
                self.expect_content(region, number * MIB + 5, 100_000, number)
            self.client("post", "q", "add", 1, "m", 0, 8, MIB - 16, region["rkey"], "add=5")
            self.assertEqual(self.client.status("q"), SUCCESS)
            with open(path, "rb") as file:
                file.seek(MIB - 16)
                self.assertEqual(file.read(8), (5).to_bytes(8, "little"))
            self.assertEqual(path.stat().st_size, BYTES)

    def test_a_part_of_the_file(self):
        for path, region in self.files(offset=MIB, bytes=2 * MIB):
            self.write(region, 2 * MIB - PAGE, PAGE, 3)
            self.expect("read", region, 2 * MIB - 1, 2, REM_ACCESS_ERR)
            with open(path, "rb") as file:
                file.seek(3 * MIB - PAGE)
                self.assertNotEqual(file.read(PAGE), bytes(PAGE))
                self.assertEqual(file.read(PAGE), bytes(PAGE))

    def test_the_name_may_go_and_the_descriptor_be_closed(self):
        for path, region in self.files():
            path.unlink()
            self.server("close", "f")
            self.write(region, 3 * MIB, 2 * PAGE, 4)
            self.expect_content(region, 3 * MIB, 2 * PAGE, 4)

    def test_local_work_requests_name_offsets(self):
        self.client.mr("big", "anon", MIB)
        for path, region in self.files():
            # The server's own SENDs, WRITEs, READs and receives gather from the file and scatter to it.
            self.client("fill", "m", 0, 50_000, 7)
            self.client("fill", "big", 0, 50_000, 8)
            remote = self.client.mr("target", "anon", MIB)
            self.server("post", "q", "write", 1, "f", 2 * MIB, 50_000, remote["addr"], remote["rkey"])
            self.assertEqual(self.server.status("q"), SUCCESS)
            self.client("fill", "target", 0, 60_000, 9)
            self.server("post", "q", "read", 2, "f", 4 * MIB + 3, 60_000, remote["addr"], remote["rkey"])
            self.assertEqual(self.server.status("q"), SUCCESS)
            self.expect_content(region, 4 * MIB + 3, 60_000, 9)
            self.server("recv", "q", 3, "f", 6 * MIB, 50_000)
            self.client("post", "q", "send", 4, "big", 0, 50_000, 0, 0)
            self.assertEqual((self.client.status("q"), self.server.status("q")), (SUCCESS, SUCCESS))
            self.expect_content(region, 6 * MIB, 50_000, 8)
            self.client("dereg", "target")

    def test_a_local_work_request_beyond_the_end_fails(self):
        self.file(self.paths[0])
        remote = self.client.mr("target", "anon", MIB)
        self.server("post", "q", "write", 1, "f", BYTES - 10, 20, remote["addr"], remote["rkey"])
        self.assertEqual(self.server.status("q"), LOC_PROT_ERR)


class Rights(Files):
    def refused(self, code, *words):
        with self.assertRaises(OSError) as raised:
            self.server("filemr", "x", *words)
        self.assertEqual(raised.exception.errno, code)

    def test_no_more_than_the_descriptor_is_open_for(self):
        for path, region in self.files(access=REMOTE_READ, flags=os.O_RDONLY):
            self.expect("read", region, 0, PAGE)
            self.expect("write", region, 0, PAGE, REM_ACCESS_ERR)
            self.expect("add", region, 0, 8, REM_ACCESS_ERR)
            for access in (ALL, LOCAL_WRITE, LOCAL_WRITE | REMOTE_WRITE):
                self.refused(errno.EACCES, path, access, os.O_RDONLY)
                self.refused(errno.EACCES, path, access, os.O_RDWR | os.O_APPEND)
            self.refused(errno.EACCES, path, REMOTE_READ, os.O_WRONLY)
            self.refused(errno.EINVAL, path, REMOTE_WRITE, os.O_RDWR)
            with self.assertRaises(OSError) as raised:
                self.server("resize", "f", 0)
            self.assertEqual(raised.exception.errno, errno.EACCES)
            self.assertEqual(path.read_bytes()[:PAGE], bytes(PAGE))

    def mappings_of_client(self, path, region):
        """The modes of the client's mappings of a file, once it accesses the region without packets."""
        before = self.client.counts("q")["direct"]
        for _ in range(500):
            self.expect("read", region, 0, PAGE)
            if self.client.counts("q")["direct"] > before:
                break
        else:
            self.fail("the client sends packets")
        lines = pathlib.Path(f"/proc/{self.client.pid}/maps").read_text().splitlines()
        return {line.split()[1] for line in lines if line.endswith(str(path))}

    def test_a_same_host_peer_maps_what_the_region_grants(self):
        for path, region in self.files(access=REMOTE_READ | LOCAL_WRITE):
            self.assertEqual(self.mappings_of_client(path, region), {"r--s"})
        for path, region in self.files():
            self.assertEqual(self.mappings_of_client(path, region), {"rw-s"})

    def test_only_regular_files(self):
        for path in ("/dev/zero", tempfile.gettempdir()):
            self.refused(errno.EOPNOTSUPP, path, REMOTE_READ, os.O_RDONLY)

    def test_a_process_without_descriptors_is_told(self):
        path = self.paths[0]
        region = self.file(path)
        resource.prlimit(self.server.pid, resource.RLIMIT_NOFILE, (64, 64))
        for number in range(64):
            other = path.with_name(str(number))
            other.write_bytes(bytes(100))
            try:
                self.server("filemr", f"n{number}", other, ALL, os.O_RDWR)
            except OSError as error:
                self.assertEqual(error.errno, errno.EMFILE)
                break
        else:
            self.fail("more files than descriptors")
        # What is registered goes on.
        self.expect("read", region, 0, 8)


class Layout(Files):
    BEYOND = ((BYTES, 1), (BYTES - 4, 8), (BYTES + 100 * MIB, 8), (BYTES - MIB // 2, MIB), (1 << 60, 8))

    def test_beyond_the_end_there_is_nothing(self):
        for path, region in self.files():
            for offset, size in self.BEYOND:
                for operation in ("read", "write"):
                    self.expect(operation, region, offset, size, REM_ACCESS_ERR)
            self.expect("add", region, BYTES, 8, REM_ACCESS_ERR)
            self.assertEqual(path.stat().st_size, BYTES, "a failed WRITE made the file longer")

    def test_it_grows_without_being_registered_again(self):
        for path, region in self.files(size=1000):
            self.expect("read", region, 990, 20, REM_ACCESS_ERR)
            for size in (5000, MIB, 40 * MIB, 1 << 32):
                os.truncate(path, size)
                self.write(region, size - 1000, 1000, 5)
                self.expect_content(region, size - 1000, 1000, 5)
                self.expect("read", region, size - 10, 20, REM_ACCESS_ERR)

    def test_truncated_by_the_owner(self):
        for path, region in self.files():
            self.write(region, 0, 64 * PAGE, 1)
            self.write(region, 5 * MIB, 64 * PAGE, 2)
            self.server("resize", "f", 4 * MIB + 100)
            self.assertEqual(path.stat().st_size, 4 * MIB + 100)
            for operation, offset, size in (("read", 5 * MIB, 8), ("write", 5 * MIB, 8), ("add", 5 * MIB, 8),
                                            ("write", 4 * MIB - 8, MIB), ("write", 4 * MIB + 99, 2)):
                self.expect(operation, region, offset, size, REM_ACCESS_ERR)
            self.assertEqual(path.stat().st_size, 4 * MIB + 100, "a failed WRITE made the file longer")
            self.expect_content(region, 0, 64 * PAGE, 1)
            self.server("resize", "f", BYTES)
            self.assertEqual(self.read_bytes(region, 5 * MIB, 64 * PAGE), bytes(64 * PAGE))

    def read_bytes(self, region, offset, size):
        self.client("fill", "m", 0, size, 77)
        self.expect("read", region, offset, size)
        return bytes.fromhex(self.client("hex", "m", 0, size)[0])

    def test_truncated_by_another_program(self):
        for path, region in self.files():
            self.write(region, 5 * MIB, 64 * PAGE, 2)
            os.truncate(path, MIB)
            for operation in ("read", "write", "add"):
                self.expect(operation, region, 5 * MIB, 8, REM_ACCESS_ERR)
            os.truncate(path, 0)
            self.expect("read", region, 2 * PAGE, 8, REM_ACCESS_ERR)
            self.assertEqual(path.stat().st_size, 0)

    def test_truncated_and_grown_under_load(self):
        for path, region in self.files():
            self.client("stream", "q", "m", region["addr"], region["rkey"], f"span={MIB}")
            for round_number in range(20):
                os.truncate(path, 2 * MIB + round_number)
                self.server("resize", "f", BYTES)
                self.server("punch", "f", 2 * MIB, 3 * MIB)
            self.assertEqual(self.client("stop", "q")["wrong"], 0)

    def test_a_punched_part_reads_as_zeros(self):
        for path, region in self.files():
            self.write(region, 2 * MIB, 64 * PAGE, 2)
            self.server("punch", "f", 2 * MIB + 100, 10 * PAGE)
            self.assertEqual(self.read_bytes(region, 2 * MIB + 100, 10 * PAGE), bytes(10 * PAGE))
            self.write(region, 2 * MIB + 5 * PAGE, PAGE, 3)
            self.expect_content(region, 2 * MIB + 5 * PAGE, PAGE, 3)
            self.assertEqual(path.stat().st_size, BYTES)

    def test_holes_are_filled_by_writes_alone(self):
        for path, region in self.files(size=1 << 36):
            for gib in range(0, 64, 7):
                self.assertEqual(self.read_bytes(region, gib << 30, 100), bytes(100))
            before = path.stat().st_blocks
            self.write(region, 33 << 30, 100, 6)
            self.expect_content(region, 33 << 30, 100, 6)
            self.assertLess(before, 200)
            self.assertGreater(os.stat(path).st_blocks + 1, before)


class FullFileSystems(Files):
    def setUp(self):
        super().setUp()
        self.mount = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", self.mount]
        if subprocess.run(command, capture_output=True).returncode != 0:
            self.skipTest("nothing can be mounted here")
        self.addCleanup(subprocess.run, ["umount", "-l", self.mount], check=True)

    def test_a_hole_that_cannot_be_filled(self):
        region = self.file(self.mount / "file")
        written, failed = [], None
        for offset in range(0, BYTES, 128 * 1024):
            self.client("fill", "m", 0, 64 * 1024, offset)
            self.client("post", "q", "write", 1, "m", 0, 64 * 1024, offset, region["rkey"])
            status = self.client.status("q")
            if status != SUCCESS:
                failed = status
                break
            written.append(offset)
        self.assertEqual(failed, REM_OP_ERR)
        for end in (self.client, self.server):
            self.assertEqual(end("state", "q")["state"], ERR)
            end("destroy", "q")
            del end.qpns["q"]
        connect(self.client, "q", self.server, "q")
        for offset in written:
            self.expect_content(region, offset, 64 * 1024, offset)


class Forks(Files):
    def test_the_region_is_the_parents(self):
        region = self.file(self.paths[0])
        self.write(region, 0, PAGE, 1)
        for mode in ("exit", "_exit", "exec"):
            child = self.server("fork", mode)["pid"]
            self.assertEqual(self.server("reap", child), [])
            self.expect_content(region, 0, PAGE, 1)

    def test_a_child_can_end_its_parents_region(self):
        self.file(self.paths[0])
        child = self.server("fork", "daemon")["pid"]
        self.addCleanup(os.kill, child, signal.SIGKILL)
        with self.assertRaises(OSError) as raised:
            self.server("resize", "f", 0)
        self.assertEqual(raised.exception.errno, errno.EINVAL)
        self.server("dereg", "f")
        self.assertEqual(self.paths[0].stat().st_size, BYTES)


class Example(unittest.TestCase):
    def test_a_file_grows_and_shrinks_while_a_peer_uses_it(self):
        program = ROOT / "build/examples/remote_file"
        for options in ((), ("--path", "udp")):
            for place in DIRECTORIES:
                with self.subTest(options=options, place=str(place)), tempfile.TemporaryDirectory(dir=place) as directory:
                    port = str(20_000 + os.getpid() % 20_000)
                    serve = [str(program), "serve", f"{directory}/file", port]
                    check = [str(program), "check", "127.0.0.1", port]
                    server = subprocess.Popen(procs.under_terrace(serve, *options, addr=fresh_address()),
                                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                    checked = subprocess.run(procs.under_terrace(check, *options, addr=fresh_address()),
                                             capture_output=True, text=True, timeout=120)
                    self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)
                    self.assertEqual(server.wait(20), 0, server.stdout.read())
                    server.stdout.close()


if __name__ == "__main__":
    unittest.main()
