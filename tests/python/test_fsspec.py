"""`terrace.fsspec` against `terrace export`, by way of `fsspec`."""

import io
import os
import pathlib
import pickle
import random
import shutil
import unittest

import terrace
from optional import ENTRY, fsspec
from server import MIB, ExportServer

if fsspec is None:
    raise unittest.SkipTest("needs fsspec")

from terrace.fsspec import TerraceFileSystem  # noqa: E402

PYPROJECT = pathlib.Path(__file__).resolve().parents[2] / "crates/python/pyproject.toml"


class FileSystem(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = ExportServer().__enter__()
        cls.addClassCleanup(cls.server.__exit__)
        cls.url = f"terrace://127.0.0.1:{cls.server.port}"
        cls.files = fsspec.filesystem("terrace", host="127.0.0.1", port=cls.server.port)

    def local(self, path):
        return self.server.path / path.strip("/")

    def test_it_is_registered(self):
        self.assertIs(fsspec.get_filesystem_class("terrace"), TerraceFileSystem)
        self.assertIn(f'[project.entry-points."fsspec.specs"]\n{ENTRY[0]} = "{ENTRY[1]}"\n', PYPROJECT.read_text())

    def test_urls(self):
        found, path = fsspec.core.url_to_fs(f"{self.url}/a/b/")
        self.assertEqual((found, path), (self.files, "/a/b"))
        self.assertEqual(found.unstrip_protocol("/a/b"), f"{self.url}/a/b")
        parse = TerraceFileSystem._get_kwargs_from_urls
        self.assertEqual(parse("terrace://host/a?b#c"), {"host": "host"})
        self.assertEqual(parse("terrace://[2001:db8::1]:99/a"), {"host": "2001:db8::1", "port": 99})
        self.assertEqual(parse("terrace:///a"), {})
        self.assertEqual(TerraceFileSystem._strip_protocol("terrace://host/a?b#c"), "/a?b#c")
        for same in ("", "/", "terrace://host", "terrace://host/"):
            self.assertEqual(TerraceFileSystem._strip_protocol(same), "/")
        self.assertEqual(TerraceFileSystem(host="::1").unstrip_protocol("a"), "terrace://[::1]:7447/a")

    def test_a_file_is_written_and_read_by_its_url(self):
        data = random.Random(1).randbytes(5 * MIB + 3)
        with fsspec.open(f"{self.url}/data", "wb") as file:
            for at in range(0, len(data), 70_001):
                file.write(data[at : at + 70_001])
        self.assertEqual(self.local("data").read_bytes(), data)
        with fsspec.open(f"{self.url}/data") as file:
            self.assertEqual((file.size, file.info()["size"], file.mode), (len(data), len(data), "rb"))
            self.assertEqual(file.read(10), data[:10])
            self.assertEqual(file.seek(-10, io.SEEK_END), len(data) - 10)
            self.assertEqual(file.read(), data[-10:])
            file.seek(4096)
            buffer = bytearray(MIB)
            self.assertEqual(file.readinto(buffer), MIB)
            self.assertEqual(buffer, data[4096 : 4096 + MIB])
            file.seek(0)
            self.assertEqual(file.read(), data)
            with self.assertRaises(io.UnsupportedOperation):
                file.write(b"x")

    def test_text_and_compression(self):
        with fsspec.open(f"{self.url}/text.csv.gz", "wt", compression="gzip") as file:
            file.writelines(f"{number},ü\n" for number in range(10_000))
        with fsspec.open(f"{self.url}/text.csv.gz", "rt", compression="infer") as file:
            self.assertEqual([line.strip() for line in file], [f"{number},ü" for number in range(10_000)])

    def test_files_are_appended_to_and_changed_in_place(self):
        with self.files.open("/changed", "wb") as file:
            self.assertEqual(file.write(b"0123456789"), 10)
            self.assertEqual(file.size, 10)
            file.sync()
        with self.files.open("/changed", "ab") as file:
            self.assertEqual(file.tell(), 10)
            file.write(b"ab")
        with self.files.open("/changed", "r+b") as file:
            file.seek(3)
            file.write(b"x")
            self.assertEqual(file.read(2), b"45")
            file.truncate(11)
        self.assertEqual(self.local("changed").read_bytes(), b"012x456789a")
        with self.assertRaises(FileExistsError):
            self.files.open("/changed", "xb")

    def test_ranges(self):
        data = random.Random(2).randbytes(100_000)
        self.files.pipe({"/one": data, "/two": b"2"})
        self.assertEqual(self.files.cat(["/one", "/two"]), {"/one": data, "/two": b"2"})
        for start, end in ((None, None), (5, 50), (-7, None), (3, -3), (50, 5), (99_999, 200_000), (-200_000, 4)):
            with self.subTest(start=start, end=end):
                expected = data[start:end]
                self.assertEqual(self.files.cat_file("/one", start, end), expected)
        self.assertEqual(self.files.cat_ranges(["/one"] * 2, [0, 10], [5, 20]), [data[:5], data[10:20]])
        self.assertEqual(self.files.head("/one", 9), data[:9])
        self.assertEqual(self.files.tail("/one", 9), data[-9:])
        self.assertEqual(self.files.read_block("/one", 10, 20), data[10:30])
        with self.assertRaises(FileExistsError):
            self.files.pipe_file("/one", b"", mode="create")

    def test_directories(self):
        self.files.makedirs("/dir/a/b")
        self.files.mkdir("/dir/c/d")
        self.files.pipe("/dir/a/file", b"12")
        with self.assertRaises(FileExistsError):
            self.files.makedirs("/dir/a")
        self.files.makedirs("/dir/a", exist_ok=True)
        self.files.makedirs("/", exist_ok=True)
        self.assertEqual(self.files.ls("/dir/a", detail=False), ["/dir/a/b", "/dir/a/file"])
        self.assertEqual([(entry["name"], entry["type"], entry["size"]) for entry in self.files.ls(f"{self.url}/dir/a/file")],
                         [("/dir/a/file", "file", 2)])
        self.assertEqual(self.files.find("/dir"), ["/dir/a/file"])
        self.assertEqual(self.files.glob("/dir/*/f*"), ["/dir/a/file"])
        self.assertEqual([path for path, _, _ in self.files.walk("/dir")], ["/dir", "/dir/a", "/dir/a/b", "/dir/c", "/dir/c/d"])
        self.assertEqual(self.files.du("/dir"), 2)
        self.assertTrue(self.files.isdir("/dir") and self.files.isfile("/dir/a/file") and not self.files.exists("/dir/x"))
        self.files.mv("/dir/a/file", "/dir/moved")
        self.files.copy("/dir/moved", "/dir/copied")
        self.files.copy("/dir", "/other", recursive=True)
        self.assertEqual(self.local("other/copied").read_bytes(), b"12")
        with self.assertRaises(IsADirectoryError):
            self.files.rm("/dir")
        self.files.rm("/dir/*ed")
        self.assertEqual(self.files.ls("/dir", detail=False), ["/dir/a", "/dir/c"])
        with self.assertRaises(OSError):
            self.files.rmdir("/dir")
        self.files.rm("/dir", recursive=True)
        self.assertFalse(self.local("dir").exists())
        self.files.rm(["/other"], recursive=True)

    def test_a_file_is_not_copied_to_itself(self):
        self.files.pipe("/self", b"123")
        self.files.client.symlink("self", "/self-link")
        for one, two in (("/self", "/self"), ("/self", "/self-link"), ("/self-link", "/self"), ("/self", f"{self.url}/self")):
            with self.assertRaises(shutil.SameFileError):
                self.files.cp_file(one, two)
        self.assertEqual(self.local("self").read_bytes(), b"123")
        self.files.rm(["/self", "/self-link"])

    def test_no_walk_and_no_removal_follows_a_link(self):
        self.files.mkdir("/kept")
        self.files.pipe("/kept/file", b"123")
        self.files.mkdir("/links")
        for name, target in (("to_directory", "../kept"), ("to_file", "../kept/file"), ("to_nothing", "nothing"), ("out", "/etc")):
            os.symlink(target, self.local("links") / name)
        types = {entry["name"]: (entry["type"], entry["islink"]) for entry in self.files.ls("/links")}
        self.assertEqual(types, {"/links/out": ("link", True), "/links/to_directory": ("link", True),
                                 "/links/to_file": ("file", True), "/links/to_nothing": ("link", True)})
        self.assertEqual(self.files.info("/links/to_file")["size"], 3)
        self.assertTrue(self.files.isdir("/links/to_directory"))
        self.assertFalse(self.files.exists("/links/to_nothing"))
        self.assertTrue(self.files.lexists("/links/to_nothing"))
        self.files.rm("/links/to_directory", recursive=True)
        self.files.rm("/links/to_nothing")
        self.files.rm("/links", recursive=True)
        self.assertEqual(self.local("kept/file").read_bytes(), b"123")

    def test_folders_are_uploaded_and_downloaded(self):
        here = self.server.path.parent / "here"
        (here / "up/inner").mkdir(parents=True)
        data = random.Random(3).randbytes(MIB)
        (here / "up/inner/file").write_bytes(data)
        self.files.put(f"{here}/up", "/up", recursive=True)
        self.assertEqual(self.local("up/inner/file").read_bytes(), data)
        self.files.get("/up", f"{here}/down", recursive=True)
        self.assertEqual((here / "down/inner/file").read_bytes(), data)
        with fsspec.open(f"simplecache::{self.url}/up/inner/file") as file:
            self.assertEqual(file.read(), data)

    def test_times(self):
        self.files.touch("/touched")
        first = self.files.modified("/touched")
        self.files.pipe("/touched", b"x")
        self.files.touch("/touched", truncate=False)
        self.assertGreaterEqual(self.files.modified("/touched"), first)
        self.assertEqual(self.files.cat("/touched"), b"x")

    def test_transactions(self):
        with self.files.transaction:
            with self.files.open("/whole", "wb") as file:
                file.write(b"bytes")
            self.assertFalse(self.local("whole").exists())
        self.assertEqual(self.local("whole").read_bytes(), b"bytes")
        with self.assertRaises(RuntimeError), self.files.transaction:
            with self.files.open("/whole", "wb") as file:
                file.write(b"other")
            raise RuntimeError
        self.assertEqual(self.local("whole").read_bytes(), b"bytes")
        self.assertEqual([path.name for path in self.server.path.glob(".whole*")], [])
        with self.files.transaction, self.assertRaises(ValueError):
            self.files.open("/whole", "ab")

    def test_errors(self):
        self.files.pipe("/file", b"x")
        for expected, attempt in ((FileNotFoundError, lambda: self.files.open("/nothing")),
                                  (FileNotFoundError, lambda: self.files.cat("/nothing")),
                                  (FileNotFoundError, lambda: self.files.ls("/nothing")),
                                  (FileNotFoundError, lambda: self.files.rm("/nothing")),
                                  (FileNotFoundError, lambda: self.files.open("/nothing/file", "wb")),
                                  (IsADirectoryError, lambda: self.files.open("/")),
                                  (NotADirectoryError, lambda: self.files.mkdir("/file/below", create_parents=False)),
                                  (ValueError, lambda: self.files.rm("/file", maxdepth=1)),
                                  (OSError, lambda: self.files.info("/../rules.toml"))):
            with self.assertRaises(expected):
                attempt()

    @unittest.skipUnless(os.geteuid() == 0, "needs a server that runs as root")
    def test_permissions(self):
        with ExportServer("") as server:
            (server.path / "secret").write_bytes(b"x")
            (server.path / "secret").chmod(0o600)
            files = fsspec.filesystem("terrace", host="127.0.0.1", port=server.port)
            for attempt in (lambda: files.cat("/secret"), lambda: files.pipe("/new", b"")):
                with self.assertRaises(PermissionError):
                    attempt()

    def test_no_server(self):
        files = fsspec.filesystem("terrace", host="127.0.0.1", port=1, timeout=1)
        with self.assertRaises(terrace.ConnectError):
            files.ls("/")

    def test_other_processes(self):
        self.files.pipe("/shared", b"bytes")
        self.assertEqual(pickle.loads(pickle.dumps(self.files)).cat("/shared"), b"bytes")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if self.files.cat("/shared") == b"bytes" else 2
            finally:
                os._exit(status)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(self.files.cat("/shared"), b"bytes")


if __name__ == "__main__":
    unittest.main()
