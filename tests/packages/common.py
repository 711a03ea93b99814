"""What the tests of packages share."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "build/packages"
sys.path.insert(0, str(ROOT / "packaging"))

import build  # noqa: E402

IS_ROOT = os.geteuid() == 0
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--") if IS_ROOT else ()
# Creating an environment takes a minute on a busy machine.
TIMEOUT_S = 300


def run(*command, **keywords):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=TIMEOUT_S, **keywords)


def modes_below(folder):
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return {str(path.relative_to(folder)): path.lstat().st_mode & 0o7777 for path in files}


def commit_epoch():
    """The time of all files in the packages."""
    return int(os.environ.get("SOURCE_DATE_EPOCH") or build.output_of("git", "log", "-1", "--format=%ct", cwd=ROOT))


class PackageTest(unittest.TestCase):
    """Tests with a folder of their own, which an ordinary user can access."""

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="terrace packages ")))
        cls.folder.chmod(0o755)

    def succeed(self, *command, **keywords):
        outcome = run(*command, **keywords)
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        return outcome.stdout
