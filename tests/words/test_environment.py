"""docs/environment.md names every environment variable that the sources read, and no other."""

import pathlib
import re
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/environment.md"
# Names with the prefix, and names in calls that read a variable.
OWN = re.compile(r"\bTERRACE_[A-Z_]*[A-Z]\b")
READ = re.compile(r"""(?:env::var(?:_os)?\(|environ(?:\.get\(|\[)|getenv\()\s*["']([A-Z_]+)["']""")
# The headers for C programs: their names with the prefix are constants.
HEADERS = "\n".join(path.read_text() for path in sorted((ROOT / "crates/ibverbs/include").rglob("*.h")))
# What systems, compilers and packagers define.
FOREIGN = {"PATH", "HOME", "TMPDIR", "LD_PRELOAD", "LD_LIBRARY_PATH", "ASAN_OPTIONS", "OUT_DIR", "CARGO_TARGET_DIR", "SOURCE_DATE_EPOCH"}
# Directories of code that users run.
PRODUCT = re.compile(r"crates/(cli|ibverbs|nic|node|np)/src/")
# Read by the library, and useful to tests alone.
FOR_TESTS = {"TERRACE_CHURN"}


def sources():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in names:
        path = ROOT / name
        if name.startswith("docs/") or name.endswith((".md", ".lock")) or path == pathlib.Path(__file__).resolve():
            continue
        try:
            yield name, path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue


def variables_in(text):
    return (set(OWN.findall(text)) | set(READ.findall(text))) - FOREIGN - set(OWN.findall(HEADERS))


def documented(section):
    """The names in the first column of a section's table."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


class Environment(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.users, self.tests = documented("For users"), documented("For tests, benchmarks and builds")

    def test_every_variable_is_documented_and_is_read(self):
        found = {name for _, text in sources() for name in variables_in(text)}
        self.assertEqual(found, self.users | self.tests)
        self.assertEqual(self.users & self.tests, set())

    def test_the_variables_of_users_are_those_of_the_product(self):
        found = {name for path, text in sources() if PRODUCT.match(path) for name in OWN.findall(text)}
        self.assertEqual(found - FOR_TESTS - set(OWN.findall(HEADERS)), self.users)

    def test_uses_are_found(self):
        text = 'env::var("TERRACE_A") os.environ.get("SPEED") os.environ["PATH"] TERRACE_B=1 MY_TERRACE_C'
        self.assertEqual(variables_in(text), {"TERRACE_A", "TERRACE_B", "SPEED"})


if __name__ == "__main__":
    unittest.main()
