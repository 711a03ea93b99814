"""`terrace.Export` against `terrace export`."""

import errno
import mmap
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
import unittest

import terrace
from server import MIB, TIMEOUT_S, Alarm, ExportServer, raise_alarms

IS_ROOT = os.geteuid() == 0


class Files(unittest.TestCase):
    """Over the usual path; `OverUdp` repeats it by packets."""

    path = "auto"

    @classmethod
    def setUpClass(cls):
        cls.server = ExportServer().__enter__()
        cls.addClassCleanup(cls.server.__exit__)
        cls.export = cls.server.connect(path=cls.path)
        cls.addClassCleanup(cls.export.close)

    def local(self, name):
        return self.server.path / name

    def test_a_file_is_made_written_and_read(self):
        data = random.Random(1).randbytes(20 * MIB + 7)
        with self.export.open("/made", "w+", permissions=0o640) as file:
            self.assertEqual(file.write_at(3, data), len(data))
            self.assertEqual(file.read_at(3, len(data)), data)
            self.assertEqual(file.read_at(0, 1 << 62), bytes(3) + data)
            self.assertEqual(file.read_at(len(data), 100), data[-3:])
            self.assertEqual(file.read_at(len(data) + 100, 100), b"")
            self.assertIsNone(file.commit())
            self.assertEqual(file.stat()["size"], len(data) + 3)
            self.assertEqual((file.path, file.closed), ("/made", False))
        self.assertTrue(file.closed)
        self.assertEqual(self.local("made").read_bytes(), bytes(3) + data)
        self.assertEqual(self.local("made").stat().st_mode & 0o7777, 0o640)

    def test_a_file_longer_than_what_is_allocated_at_once(self):
        self.local("long").touch()
        os.truncate(self.local("long"), 150 * MIB)
        ends = ((0, b"first"), (64 * MIB - 2, b"middle"), (150 * MIB - 4, b"last"))
        with self.export.open("long", "r+") as file:
            for at, data in ends:
                file.write_at(at, data)
            found = file.read_at(0, 1 << 62)
        self.assertEqual(len(found), 150 * MIB)
        self.assertEqual([found[at : at + len(data)] for at, data in ends], [data for _, data in ends])
        self.assertEqual(found.count(0), 150 * MIB - sum(len(data) for _, data in ends))

    def test_every_kind_of_buffer(self):
        data = random.Random(2).randbytes(4096)
        self.local("buffers").write_bytes(data)
        with self.export.open("buffers", "r+") as file:
            for buffer in (bytearray(4096), memoryview(bytearray(8192))[10:4106], mmap.mmap(-1, 4096)):
                self.assertEqual(file.read_into_at(0, buffer), 4096)
                self.assertEqual(bytes(memoryview(buffer)), data)
                self.assertEqual(file.write_at(0, buffer), 4096)
            self.assertEqual(file.read_into_at(0, bytearray()), 0)
            self.assertEqual(file.write_at(0, b""), 0)
            short = bytearray(10)
            self.assertEqual(file.read_into_at(4090, short), 6)
            self.assertEqual(short, data[-6:] + bytes(4))
            for wrong in (b"read-only", "text", 7):
                with self.assertRaises((BufferError, TypeError)):
                    file.read_into_at(0, wrong)
            with self.assertRaises(OverflowError):
                file.read_at(-1, 1)

    def test_appended_records_are_in_the_file_once(self):
        with self.export.open("log", "a") as file:
            self.assertEqual(file.append(b"one"), 3)
            self.assertEqual(file.append(bytes(3 * MIB)), 3 + 3 * MIB)
        with self.export.open("log", "a") as file:
            file.append(b"three")
        self.assertEqual(self.local("log").read_bytes(), b"one" + bytes(3 * MIB) + b"three")

    def test_modes(self):
        self.local("modes").write_bytes(b"old")
        with self.export.open("modes", "rb") as file, self.assertRaises(OSError) as caught:
            file.write_at(0, b"x")
        self.assertEqual(caught.exception.errno, errno.EBADF)
        with self.assertRaises(FileExistsError):
            self.export.open("modes", "x")
        self.export.open("modes", "r+").write_at(1, b"u")
        self.assertEqual(self.local("modes").read_bytes(), b"oud")
        self.export.open("modes", "w").close()
        self.assertEqual(self.local("modes").read_bytes(), b"")
        for mode in ("", "rw", "q", "r++", "bb"):
            with self.assertRaises(ValueError):
                self.export.open("modes", mode)

    def test_attributes_are_the_servers(self):
        self.local("attributes").write_bytes(b"12345")
        os.utime(self.local("attributes"), (1_234_567_890, 1_234_567_890.5))
        found, stat = self.export.stat("attributes"), self.local("attributes").stat()
        expected = {"type": "file", "size": 5, "mode": stat.st_mode & 0o7777, "uid": stat.st_uid, "gid": stat.st_gid, "nlink": 1,
                    "ino": stat.st_ino, "mtime": 1_234_567_890.5, "ctime": stat.st_ctime, "name": "attributes"}
        self.assertEqual(found, expected)
        self.assertEqual(self.export.stat("/")["type"], "directory")
        self.export.touch("attributes")
        self.assertAlmostEqual(self.export.stat("attributes")["mtime"], time.time(), delta=60)
        self.export.chmod("attributes", 0o600)
        self.export.truncate("attributes", 3)
        self.assertEqual((self.local("attributes").stat().st_mode & 0o777, self.local("attributes").read_bytes()), (0o600, b"123"))

    def test_names(self):
        self.export.mkdir("/names", 0o700)
        self.export.mkdir("names/inner")
        self.export.open("names/file", "x").close()
        self.export.symlink("file", "names/link")
        self.assertEqual({entry["name"]: entry["type"] for entry in self.export.list("names/")},
                         {"inner": "directory", "file": "file", "link": "link"})
        self.assertEqual(self.export.stat("names/link")["type"], "file")
        self.assertEqual(self.export.stat("names/link", follow_symlinks=False)["type"], "link")
        self.export.rename("names/file", "names/inner/moved")
        with self.assertRaises(FileExistsError):
            self.export.rename("names/inner/moved", "names/link", exclusive=True)
        self.export.unlink("names/link")
        self.export.unlink("names/inner/moved")
        self.export.rmdir("names/inner")
        self.assertEqual(self.export.list("names"), [])

    def test_a_directory_of_many_names(self):
        self.local("many").mkdir()
        for number in range(3000):
            self.local(f"many/file number {number}").touch()
        self.assertEqual({entry["name"] for entry in self.export.list("many")}, {f"file number {number}" for number in range(3000)})

    def test_names_of_any_bytes(self):
        name = os.fsdecode(b"\xff\xfe \xe2\x82\xac")
        self.export.open(name, "w").close()
        self.assertIn(name, {entry["name"] for entry in self.export.list("")})
        self.assertTrue(os.path.exists(os.path.join(os.fsencode(self.server.path), b"\xff\xfe \xe2\x82\xac")))

    def test_paths_of_all_types(self):
        for number, of in enumerate((str, os.fsencode, pathlib.Path)):
            name, link = of(f"path {number}"), of(f"link {number}")
            self.export.open(name, "w").close()
            self.export.symlink(name, link)
            self.assertEqual(self.export.stat(link)["name"], f"link {number}")
            self.export.rename(link, of(f"renamed {number}"))
            self.export.unlink(of(f"renamed {number}"))
        with self.assertRaisesRegex(TypeError, "expected str, bytes or os.PathLike object, not int"):
            self.export.stat(7)

    def test_errors_are_pythons_with_the_path(self):
        self.local("a file").write_bytes(b"x")
        self.local("full").mkdir()
        self.local("full/file").touch()
        attempts = {
            FileNotFoundError: ("no such", lambda path: self.export.open(path)),
            NotADirectoryError: ("a file/below", lambda path: self.export.stat(path)),
            IsADirectoryError: ("full", lambda path: self.export.unlink(path)),
            FileExistsError: ("full", lambda path: self.export.mkdir(path)),
        }
        for expected, (path, attempt) in attempts.items():
            with self.subTest(error=expected.__name__), self.assertRaises(expected) as caught:
                attempt(path)
            self.assertEqual(caught.exception.filename, path)
        for number, attempt in ((errno.ENOTEMPTY, lambda: self.export.rmdir("full")), (errno.EBUSY, lambda: self.export.rmdir("/")),
                                (errno.EXDEV, lambda: self.export.stat("../rules.toml")),
                                (errno.ENAMETOOLONG, lambda: self.export.mkdir("n" * 300)),
                                (errno.EINVAL, lambda: self.export.stat("a\0b"))):
            with self.assertRaises(OSError) as caught:
                attempt()
            self.assertEqual(caught.exception.errno, number)

    def test_several_threads(self):
        failures = []

        def work(thread):
            with self.export.open(f"thread {thread}", "w+") as file:
                for turn in range(50):
                    data = random.Random(turn).randbytes(10_000)
                    file.write_at(turn, data)
                    if file.read_at(turn, 10_000) != data:
                        failures.append((thread, turn))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        self.assertEqual(failures, [])

    def test_closed_objects(self):
        export = self.server.connect(path=self.path)
        file = export.open("closed", "w")
        self.assertRegex(repr(export), r"^<terrace\.Export of 127\.0\.0\.1:\d+>$")
        export.close()
        export.close()
        # The file keeps the connection.
        self.assertEqual(file.write_at(0, b"x"), 1)
        file.close()
        file.close()
        for attempt in (lambda: export.stat("/"), lambda: file.write_at(0, b"x"), lambda: export.read_only):
            with self.assertRaisesRegex(terrace.ConnectionLostError, "connect again"):
                attempt()

    def test_a_forked_child_has_to_connect_again(self):
        with self.export.open("forked", "w+") as file:
            file.write_at(0, b"parent")
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    file.read_at(0, 1)
                except terrace.ConnectionLostError:
                    with self.server.connect(path=self.path) as export, export.open("forked") as own:
                        status = 0 if own.read_at(0, 10) == b"parent" else 2
                finally:
                    os._exit(status)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.assertEqual(file.read_at(0, 10), b"parent")


class OverUdp(Files):
    """The same by packets."""

    path = "udp"


class Servers(unittest.TestCase):
    """What happens to servers, as clients see it."""

    def test_a_restarted_server_is_found_again(self):
        with ExportServer() as server, server.connect() as export, export.open("file", "w+") as file:
            file.write_at(0, b"before")
            server.end()
            server.start()
            self.assertEqual(file.read_at(0, 10), b"before")
            self.assertEqual(export.stat("file")["size"], 6)

    def test_a_call_ends_by_its_timeout_and_releases_the_interpreter(self):
        with ExportServer() as server, server.connect(path="udp", timeout=1) as export:
            server.pause()
            turns = []
            other = threading.Thread(target=lambda: [turns.append(time.sleep(0.001)) for _ in range(50)])
            other.start()
            started = time.monotonic()
            with self.assertRaises(terrace.ConnectionLostError):
                export.mkdir("directory")
            self.assertLess(time.monotonic() - started, 10)
            self.assertEqual(len(turns), 50)
            other.join()
            server.go_on()

    def test_no_server_and_wrong_arguments(self):
        with self.assertRaisesRegex(terrace.ConnectError, "export"):
            terrace.connect_export("127.0.0.1", port=1, timeout=1)
        for keywords in ({"path": "nothing"}, {"timeout": -1}, {"timeout": float("nan")}, {"local": "no such host.invalid"}):
            with self.assertRaises((ValueError, OSError)):
                terrace.connect_export("127.0.0.1", port=1, **keywords)

    def test_rules(self):
        with ExportServer('root = true\n[local]\naccess = "ro"\n') as server, server.connect() as export:
            self.assertTrue(export.read_only)
            with self.assertRaises(OSError) as caught:
                export.mkdir("directory")
            self.assertEqual(caught.exception.errno, errno.EROFS)
        with ExportServer('[local]\naccess = "none"\n') as server, self.assertRaises(terrace.RefusedError):
            server.connect(timeout=2)

    @unittest.skipUnless(IS_ROOT, "needs a server that runs as root")
    def test_the_kernel_checks_the_clients_permissions(self):
        # The client is root, whom the server takes for nobody.
        with ExportServer("") as server, server.connect() as export:
            (server.path / "secret").write_bytes(b"x")
            (server.path / "secret").chmod(0o600)
            for attempt in (lambda: export.open("secret"), lambda: export.mkdir("directory"), lambda: export.unlink("secret")):
                with self.assertRaises(PermissionError):
                    attempt()

    def test_an_interpreter_ends_with_open_files(self):
        script = "import sys, terrace; file = terrace.connect_export('127.0.0.1', port=int(sys.argv[1])).open('file', 'w'); file.write_at(0, b'x')"
        with ExportServer() as server:
            command = [sys.executable, "-c", script, str(server.port)]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
            self.assertEqual((ended.returncode, ended.stdout, ended.stderr), (0, "", ""))
            self.assertEqual((server.path / "file").read_bytes(), b"x")

    def test_signals_are_handled_while_a_client_connects(self):
        """To an export that is stopped: without the signal, it would be an error after 5 s."""
        raise_alarms(self)
        with ExportServer() as server:
            server.pause()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with self.assertRaises(Alarm) as caught:
                server.connect(path="udp")
            self.assertIsNone(caught.exception.__context__, "it had not ended yet")
            server.go_on()

    def test_signals_are_handled_while_a_call_waits_for_a_server_that_is_stopped(self):
        """Without the signal, a call would wait for longer than a test may."""
        raise_alarms(self)
        for path in ("udp", "local"):
            with ExportServer() as server, server.connect(path=path, timeout=3600) as export, export.open("file", "w+") as file:
                file.write_at(0, bytes(MIB))
                attempts = {
                    "stat": lambda: export.stat("file"),
                    "mkdir": lambda: export.mkdir("directory"),
                    "open": lambda: export.open("new", "x"),
                    "append": lambda: file.append(bytes(MIB)),
                    "truncate": lambda: file.truncate(1),
                    "commit": file.commit,
                }
                if path == "udp":
                    # Within the host they need no server.
                    attempts |= {"read": lambda: file.read_at(0, MIB), "write": lambda: file.write_at(0, bytes(MIB))}
                for name, attempt in attempts.items():
                    with self.subTest(path=path, call=name):
                        server.pause()
                        signal.setitimer(signal.ITIMER_REAL, 0.1)
                        with self.assertRaises(Alarm) as caught:
                            attempt()
                        self.assertIsNone(caught.exception.__context__, "it had not ended yet")
                        # Also while it connects again.
                        signal.setitimer(signal.ITIMER_REAL, 0.1)
                        with self.assertRaises(Alarm):
                            attempt()
                        server.go_on()
                        self.assertEqual(export.stat("/")["type"], "directory")
                        self.assertEqual(len(file.read_at(0, 1)), 1)

    def test_a_handler_of_a_signal_uses_the_client_whose_call_it_interrupts(self):
        with ExportServer() as server, server.connect(path="udp") as export, export.open("file", "w+") as file:
            file.write_at(0, b"x")
            found = []

            def ring(*_):
                server.go_on()
                found.append((file.read_at(0, 10), export.stat("file")["size"]))

            self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, ring))
            server.pause()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            self.assertEqual(file.read_at(0, 1), b"x")
            self.assertEqual(found, [(b"x", 1)])

    def test_signals_are_handled_between_the_steps_of_a_long_access(self):
        raise_alarms(self)
        with ExportServer() as server, server.connect(path="udp") as export, export.open("file", "w") as file:
            # It takes longer than the timer by packets.
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with self.assertRaises(Alarm):
                for _ in range(100):
                    file.write_at(0, bytes(64 * MIB))


if __name__ == "__main__":
    unittest.main()
