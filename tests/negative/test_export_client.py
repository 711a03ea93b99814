"""The C API of exported directories (`terrace_export.h`): an example program, and the error numbers of refused calls."""

import contextlib
import errno
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

from support import ROOT, TERRACE, fresh_address

PROGRAM = ROOT / "build/examples/export_client"
LIBRARIES = ROOT / "build/lib/terrace"
TIMEOUT_S = 60
IN_OWN_NAMESPACE = ("unshare", "--map-root-user", "--mount")
IN_OWN_NAMESPACE_WORKS = subprocess.run([*IN_OWN_NAMESPACE, "true"], capture_output=True).returncode == 0

# Calls functions by ctypes in a process of its own. `call` returns the result and errno.
PRELUDE = """
import ctypes, errno, os, sys
library = ctypes.CDLL(sys.argv[1], use_errno=True)
P, S = ctypes.c_void_p, ctypes.c_size_t
for name in ("terrace_export_connect", "terrace_export_open"):
    getattr(library, name).restype = P
library.terrace_file_append.restype = ctypes.c_int64
for name in ("terrace_file_pread", "terrace_file_pwrite"):
    getattr(library, name).restype = ctypes.c_ssize_t
def call(name, *arguments):
    ctypes.set_errno(0)
    result = getattr(library, "terrace_" + name)(*arguments)
    return result, errno.errorcode.get(ctypes.get_errno())
def refused(expected, name, *arguments):
    result, found = call(name, *arguments)
    assert result in (-1, None) and found == expected, (name, arguments, result, found)
server = sys.argv[2].encode()
"""

REFUSED = PRELUDE + """
refused("EINVAL", "export_connect", None, 0)
connection = P(call("export_connect", server, 5000)[0])
assert connection.value
at = lambda path, flags, mode=0o600: call("export_open", connection, path, flags, mode)
for path, flags, expected in (
        (b"none", os.O_RDONLY, "ENOENT"), (b"sub", os.O_RDWR, "EISDIR"), (None, os.O_RDONLY, "EINVAL"),
        (b"file", os.O_CREAT | os.O_EXCL | os.O_RDWR, "EEXIST"), (b"file", os.O_DIRECTORY, "EINVAL"),
        (b"file", os.O_RDONLY | os.O_TRUNC, "EINVAL"), (b"file/x", os.O_RDONLY, "ENOTDIR"),
        (b"sub/../../file", os.O_RDONLY, "EXDEV"), (b"x" * 300, os.O_CREAT | os.O_RDWR, "ENAMETOOLONG")):
    assert at(path, flags) == (None, expected), (path, flags, at(path, flags))
refused("EINVAL", "export_open", None, b"file", os.O_RDONLY, 0)
refused("ENOTEMPTY", "export_rmdir", connection, b"sub")
refused("EINVAL", "export_unlink", connection, b"..")
refused("EEXIST", "export_mkdir", connection, b"/sub", 0o700)
refused("ENOENT", "export_rename", connection, b"none", b"other")
refused("EINVAL", "export_stat", connection, b"file", None)
refused("EINVAL", "export_readdir", connection, b"", None, None)
buffer = ctypes.create_string_buffer(b"0123456789", 10)
reader = P(at(b"file", os.O_RDONLY)[0])
assert call("file_pread", reader, buffer, S(10), ctypes.c_uint64(2))[0] == 2 and buffer.raw == b"le23456789"
refused("EBADF", "file_pwrite", reader, buffer, S(10), ctypes.c_uint64(0))
refused("EBADF", "file_append", reader, buffer, S(10), 0)
refused("EINVAL", "file_pread", reader, None, S(10), ctypes.c_uint64(0))
appender = P(at(b"file", os.O_WRONLY | os.O_APPEND)[0])
assert call("file_append", appender, buffer, S(10), 1)[0] == 4
refused("EINVAL", "file_append", appender, buffer, S(10), 2)
refused("EBADF", "file_pwrite", appender, buffer, S(10), ctypes.c_uint64(0))
writer = P(at(b"file", os.O_RDWR)[0])
assert call("file_pwrite", writer, buffer, S(10), ctypes.c_uint64(20))[0] == 10
assert call("file_truncate", writer, ctypes.c_uint64(15))[0] == 0
assert call("file_flock", writer, ctypes.c_uint64(1), 2, 0)[0] == 0
refused("EAGAIN", "file_flock", reader, ctypes.c_uint64(2), 1, 0)
refused("EINVAL", "file_flock", reader, ctypes.c_uint64(2), 64, 0)
for file in (reader, appender, writer):
    assert call("file_close", file)[0] == 0
refused("EINVAL", "file_close", None)
names = []
ENTRY = ctypes.CFUNCTYPE(ctypes.c_int, P, ctypes.c_char_p, P)
assert call("export_readdir", connection, b"/", ENTRY(lambda _, name, stat: names.append(name) or 0), None)[0] == 0
assert sorted(names) == [b"file", b"sub"], names
assert call("export_readdir", connection, b"/", ENTRY(lambda *_: 7), None)[0] == 7
library.terrace_export_disconnect(connection)
library.terrace_export_disconnect(None)
"""

STOPPED = PRELUDE + """
connection = P(call("export_connect", server, 1000)[0])
file = P(call("export_open", connection, b"file", os.O_RDWR, 0)[0])
print("open", flush=True)
sys.stdin.readline()
refused("ETIMEDOUT", "file_stat", file, ctypes.create_string_buffer(1024))
refused("ETIMEDOUT", "file_pwrite", file, b"x", S(1), ctypes.c_uint64(1 << 20))
"""


class ExportClient(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.address = fresh_address()
        command = [str(TERRACE), "export", str(self.directory), "--listen", f"{self.address}:7447"]
        self.server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.addCleanup(self.server.stdout.close)
        self.addCleanup(self.server.wait)
        self.addCleanup(self.server.kill)
        self.assertIn("7447", self.server.stdout.readline())

    def run_program(self, *words, stdin=b""):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(LIBRARIES)}
        return subprocess.run([str(PROGRAM), *words], input=stdin, capture_output=True, env=environment, timeout=TIMEOUT_S)

    def succeed(self, *words, stdin=b""):
        done = self.run_program(self.address, *words, stdin=stdin)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def script(self, text):
        return [sys.executable, "-c", text, str(LIBRARIES / "libibverbs.so.1"), self.address]

    def test_the_example_keeps_files_on_the_server(self):
        data = os.urandom(3 << 20)
        self.succeed("put", "data", stdin=data)
        self.assertEqual((self.directory / "data").read_bytes(), data)
        self.assertEqual(self.succeed("get", "/data"), data)
        self.assertEqual(self.succeed("append", "data", stdin=b"record"), f"6 bytes at {len(data)}\n".encode())
        self.assertEqual((self.directory / "data").read_bytes(), data + b"record")
        self.assertIn(f"{len(data) + 6} data", self.succeed("list", "/").decode())
        self.succeed("remove", "data")
        self.assertFalse((self.directory / "data").exists())

    def test_the_example_says_why_it_fails(self):
        for words, reason in (((self.address, "get", "none"), errno.ENOENT), ((self.address, "get", "."), errno.EISDIR),
                              (("127.0.0.1:1", "list", "/"), errno.ETIMEDOUT)):
            done = self.run_program(*words)
            self.assertEqual(done.returncode, 1, words)
            self.assertIn(os.strerror(reason), done.stderr.decode(), words)

    @unittest.skipUnless(IN_OWN_NAMESPACE_WORKS, "no user or mount name spaces here")
    def test_a_name_whose_first_address_has_no_export(self):
        """Both orders of the name's addresses: the resolver may sort them."""
        hosts, other = self.directory / "hosts", fresh_address()
        bind = ("sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', hosts)
        environment = {**os.environ, "LD_LIBRARY_PATH": str(LIBRARIES)}
        for addresses in ((self.address, other), (other, self.address)):
            hosts.write_text("".join(f"{address} both.test\n" for address in addresses))
            for command, said in (((PROGRAM, "both.test", "list", "/"), "hosts"),
                                  ((TERRACE, "mount", "both.test:/none", self.directory), "No such file or directory")):
                with self.subTest(addresses=addresses, command=command[1]):
                    done = subprocess.run([*map(str, (*IN_OWN_NAMESPACE, *bind, *command))], capture_output=True, text=True,
                                          env=environment, timeout=TIMEOUT_S)
                    self.assertIn(said, done.stdout + done.stderr)

    def test_refused_calls_have_error_numbers(self):
        (self.directory / "file").write_bytes(b"file")
        (self.directory / "sub/sub").mkdir(parents=True)
        done = subprocess.run(self.script(REFUSED), capture_output=True, text=True, timeout=TIMEOUT_S)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((self.directory / "file").read_bytes(), b"filele23456789\0")

    def test_calls_end_when_the_server_is_stopped(self):
        (self.directory / "file").write_bytes(b"file")
        with subprocess.Popen(self.script(STOPPED), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) as client:
            self.assertEqual(client.stdout.readline(), "open\n")
            self.server.send_signal(signal.SIGSTOP)
            # On a busy machine its other threads run until the one that has the signal does.
            os.waitid(os.P_PID, self.server.pid, os.WSTOPPED | os.WNOWAIT)
            with contextlib.ExitStack() as stack:
                stack.callback(self.server.send_signal, signal.SIGCONT)
                _, errors = client.communicate("\n", timeout=TIMEOUT_S)
            self.assertEqual(client.returncode, 0, errors)


if __name__ == "__main__":
    unittest.main()
