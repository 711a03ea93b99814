"""What `terrace run` does for programs that a preloaded library alone does not serve."""

import pathlib
import subprocess
import tempfile
import unittest

from support import PROGRAMS, TERRACE, NegativeTest, fresh_address, procs

FOLDER = TERRACE.parents[1] / "lib/terrace"
IN_OWN_NAMESPACE = ("unshare", "--map-root-user", "--mount")


def run(*command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)


class Launching(NegativeTest):
    def setUp(self):
        self.directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def terrace(self, *command, before=(), options=()):
        return run(*before, *procs.under_terrace(map(str, command), *options, addr=fresh_address()))

    def assert_prints(self, outcome, text):
        self.assertEqual((outcome.returncode, outcome.stdout, outcome.stderr), (0, text, ""))


class Loading(Launching):
    """Programs that load libibverbs by themselves."""

    def test_both_names_of_the_library(self):
        for name in ("libibverbs.so", "libibverbs.so.1"):
            with self.subTest(name):
                self.assert_prints(self.terrace(PROGRAMS / "loader", name), "terrace0\n")

    def test_the_installed_files_are_the_same_library(self):
        for name in ("libibverbs.so", "libibverbs.so.1"):
            with self.subTest(name):
                self.assert_prints(self.terrace(PROGRAMS / "loader", FOLDER / name), "terrace0\n")

    @unittest.skipUnless(run(*IN_OWN_NAMESPACE, "true").returncode == 0, "no user or mount name spaces here")
    def test_an_absolute_path_with_a_mount(self):
        path = run("gcc", "-print-file-name=libibverbs.so.1").stdout.strip()
        mount = (*IN_OWN_NAMESPACE, "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', FOLDER / "libibverbs.so.1", path)
        self.assert_prints(self.terrace(PROGRAMS / "loader", path, before=mount), "terrace0\n")


if __name__ == "__main__":
    unittest.main()
