"""Documents of `--json`: versioned, and with the fields that docs/json.md lists."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

from support import ROOT, TERRACE, NegativeTest, fresh_address, procs

# Objects whose fields are counters, and reports whose fields the page leaves to the text output.
OPEN = {"devices." + name for name in ("port", "dropped", "same_host", "objects", "injected", "queue_pairs.counts", "clients", "np",
                                     "memory_node", "memory_nodes", "pager", "swap_device")}


LIBRARY = ROOT / "build/lib/terrace/libibverbs.so.1"
# Has a file of an export open to which it has appended two records, one with a commit, and has asked for one that is not there.
CLIENT = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1], use_errno=True)
for call in (library.terrace_export_connect, library.terrace_export_open):
    call.restype = ctypes.c_void_p
library.terrace_file_append.restype = ctypes.c_int64
connection = ctypes.c_void_p(library.terrace_export_connect(sys.argv[2].encode(), ctypes.c_uint16(0)))
assert library.terrace_export_open(connection, b"none", os.O_RDONLY, 0) is None
file = ctypes.c_void_p(library.terrace_export_open(connection, b"log", os.O_RDWR | os.O_CREAT, 0o644))
assert library.terrace_file_append(file, b"first", ctypes.c_size_t(5), 0) == 0
assert library.terrace_file_append(file, b"a record", ctypes.c_size_t(8), 1) == 5  # TERRACE_FILE_COMMIT
print("ready", flush=True)
sys.stdin.read()
"""


def listed(section):
    """The fields in the tables of a section of the page."""
    text = (ROOT / "docs/json.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def fields(value, prefix=""):
    """The paths of a document's fields."""
    if isinstance(value, list):
        return set().union(*(fields(element, prefix) for element in value))
    if not isinstance(value, dict) or prefix.removesuffix(".") in OPEN:
        return set()
    return set().union(*({prefix + name} | fields(field, f"{prefix}{name}.") for name, field in value.items()))


class Documents(NegativeTest):
    def document(self, *arguments):
        shown = subprocess.run([TERRACE, *map(str, arguments), "--json"], capture_output=True, text=True, timeout=60)
        self.assertEqual(shown.returncode, 0, shown.stderr)
        return self.checked(shown.stdout)

    def checked(self, text):
        document = json.loads(text)
        self.assertEqual(document.pop("version"), 1)
        return document

    def serve(self, folder, *options):
        address = fresh_address()
        region = f"table={folder}/table.bin:1M"
        node = procs.Program([TERRACE, "serve", "--region", region, "--dram", "8M", "--listen", address, "--frames", folder, *options],
                             folder, "node")
        self.addCleanup(node.stop)
        procs.wait_until(lambda: "serving at" in node.paths[0].read_text(), "the node serves")
        return node

    def test_doctor_and_devices(self):
        address = fresh_address()
        self.assertEqual(fields(self.document("doctor", "--addr", address)), listed("terrace doctor"))
        self.assertEqual(fields(self.document("devices", "--addr", address)), listed("terrace devices"))

    def test_stat(self):
        left, _, *_ = self.pair()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        node = self.serve(folder)
        found = fields(self.document("stat", left.pid)) | fields(self.document("stat", node.process.pid))
        # Without clients, a fault plan, NP-RDMA, a pool of pages and a pager; files and exports have a test of their own.
        absent = {f"devices.{name}" for name in ("clients", "injected", "np", "memory_node", "memory_nodes", "pager", "swap_device")}
        names = listed("terrace stat") - absent
        self.assertEqual(found, {name for name in names if not re.match(r"devices\.(files|export)\b", name)})
        self.assertLessEqual({left.pid, node.process.pid}, {device["pid"] for device in self.document("stat")["devices"]})

    def test_stat_of_an_export(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        pathlib.Path(folder, "exported").mkdir()
        address = fresh_address()
        server = procs.Program([TERRACE, "export", f"{folder}/exported", "--listen", f"{address}:7447"], folder, "export")
        self.addCleanup(server.stop)
        procs.wait_until(lambda: procs.is_listening(7447) and server.paths[0].read_text(), "the export serves")
        client = subprocess.Popen([sys.executable, "-c", CLIENT, str(LIBRARY), address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.addCleanup(client.wait)
        self.addCleanup(client.stdout.close)
        self.addCleanup(client.stdin.close)
        self.assertEqual(client.stdout.readline(), "ready\n")
        document = self.document("stat", server.process.pid)
        (device,) = document["devices"]
        names = {name for name in listed("terrace stat") if re.match(r"devices\.(files|export)\b", name)}
        self.assertLessEqual(names, fields(document))
        self.assertEqual({name for name in fields(document) if re.match(r"devices\.(files|export)\b", name)}, names)
        counts, (user,) = device["export"], device["export"]["clients"]
        self.assertEqual((counts["open_files"], counts["locks"], counts["refused"], user["open_files"], user["uid"]), (1, 0, 1, 1, os.geteuid()))
        self.assertEqual(counts["requests"], user["requests"])
        self.assertIn(f"process {client.pid}", user["client"])
        files = device["files"]
        self.assertEqual({name: files[name] for name in ("open_files", "appends", "appended_bytes", "commits", "refused")},
                         {"open_files": 1, "appends": 2, "appended_bytes": 13, "commits": 1, "refused": 0})

    def test_memory_node(self):
        place = f"{fresh_address()}:{procs.free_port()}"
        folder = self.enterContext(tempfile.TemporaryDirectory())
        node = procs.Program([TERRACE, "memory-node", "--memory", "16M", "--listen", place], folder, "node")
        self.addCleanup(node.stop)
        procs.wait_until(lambda: "lending" in node.paths[0].read_text(), "the node lends memory")
        document = self.document("memory-node", "--status", place)
        self.assertEqual(document["clients"], [])
        names = listed("terrace memory-node")
        self.assertEqual(fields(document), {name for name in names if not name.startswith("clients.")})
        source = (ROOT / "crates/far_memory/src/status.rs").read_text()
        self.assertEqual([name for name in names if f"pub {name.removeprefix('clients.')}:" not in source], [])

    def test_watch_prints_a_document_a_line(self):
        end = self.start()
        watch = subprocess.Popen([TERRACE, "stat", "--json", "--watch", str(end.pid)], stdout=subprocess.PIPE, text=True)
        self.addCleanup(watch.stdout.close)
        self.addCleanup(watch.wait)
        self.addCleanup(watch.kill)
        for _ in range(2):
            (device,) = self.checked(watch.stdout.readline())["devices"]
            self.assertEqual(device["pid"], end.pid)

    def test_recover(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        node = self.serve(folder)
        node.process.send_signal(signal.SIGKILL)
        node.process.wait()
        node.outcome()
        document = self.document("recover", pathlib.Path(folder, "table.bin"), "--frames", folder)
        self.assertEqual(fields(document) | {"files.pools.path", "files.pools.is_removed"}, listed("terrace recover"))

    def test_bench(self):
        page = (ROOT / "docs/json.md").read_text()
        for command, names in (("demo-term", {"rows"}), ("flush", {"alone", "beside", "ratio"})):
            self.assertEqual(set(self.document("bench", command, "--rehearse")), names)
            self.assertTrue(all(f"`{name}`" in page for name in names))
