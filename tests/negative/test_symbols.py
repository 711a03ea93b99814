"""The symbols of Terrace's libibverbs compared with those of the replaced libraries: Debian's, and rdma-core's
newest."""

import pathlib
import re
import subprocess
import tempfile
import unittest

from support import ROOT

OURS = ROOT / "build/lib/terrace/libibverbs.so.1"

# Symbols and version nodes of other releases: public ones of the newest, private ones of all.
NEWER, PRIVATE = (pathlib.Path(__file__).with_name(f"libibverbs-{which}.txt") for which in ("65", "private"))

# A defined dynamic symbol in readelf's output: kind, binding, name and node; `@@` marks the default node of a name.
SYMBOL = re.compile(r"\d+: [0-9a-f]+ +\d+ (\w+) +(?:GLOBAL|WEAK) +DEFAULT +(ABS|\d+) (\w[^@\s]*)(?:(@@?)(\S+))?$")


def output_of(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


def path_from_linker(library):
    """The path of a system library."""
    return output_of("gcc", f"-print-file-name={library}").strip()


def symbols_of(library):
    """(name, node) -> (kind, whether it is the default node) of each symbol that a library defines, version nodes
    included."""
    symbols = {}
    for line in output_of("readelf", "--dyn-syms", "--wide", str(library)).splitlines():
        if found := SYMBOL.search(line):
            kind, section, name, mark, node = found.groups()
            symbols[name, name if section == "ABS" else node] = (kind, mark == "@@")
    return symbols


def soname_of(library):
    return re.search(r"SONAME.*\[(.*)\]", output_of("readelf", "--dynamic", "--wide", str(library)))[1]


class Symbols(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.theirs, cls.ours = symbols_of(path_from_linker("libibverbs.so.1")), symbols_of(OURS)

    def test_the_systems_library_can_be_replaced(self):
        self.assertGreater(len(self.theirs), 180)
        self.assertEqual(soname_of(OURS), soname_of(path_from_linker("libibverbs.so.1")))
        self.assertEqual(self.theirs.keys() - self.ours.keys(), set())
        for (name, node), (kind, is_default) in self.theirs.items():
            with self.subTest(name=name, node=node):
                self.assertEqual(self.ours[name, node][0], kind)
                # Terrace's library has private nodes of several releases, so none is the default. Providers name their
                # node.
                if "PRIVATE" not in node:
                    self.assertEqual(self.ours[name, node][1], is_default)

    def test_no_symbol_of_debians_package_is_missing(self):
        (symbols,) = pathlib.Path("/var/lib/dpkg/info").glob("libibverbs1*.symbols")
        version = output_of("dpkg-query", "--show", "--showformat=${Version}", "libibverbs1")
        with tempfile.TemporaryDirectory() as directory:
            # With -c1 the command fails only for missing symbols, not for new ones.
            command = ["dpkg-gensymbols", "-c1", "-plibibverbs1", f"-v{version}", f"-I{symbols}", f"-e{OURS}", "-O/dev/null"]
            checked = subprocess.run(command, cwd=directory, capture_output=True, text=True)
        self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_symbols_of_newer_releases_exist(self):
        self.expect(NEWER, 120)

    def test_private_symbols_of_every_release_exist(self):
        self.expect(PRIVATE, 390)

    def expect(self, listed, count_min):
        lines = [line.split() for line in listed.read_text().splitlines() if not line.startswith("#")]
        self.assertGreater(len(lines), count_min)
        self.assertEqual({tuple(line) for line in lines} - self.ours.keys(), set())

    def test_symbols_without_node_are_interposed_functions(self):
        public = {name for name, node in self.ours if node is None}
        self.assertGreater(len(public), 20)
        self.assertEqual(public - {name for name, _ in symbols_of(path_from_linker("libc.so.6"))}, set())


if __name__ == "__main__":
    unittest.main()
