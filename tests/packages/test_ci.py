"""The examples of docs/ci.md: the workflow's steps run for an ordinary user. `make packages-test` runs this."""

import os
import re
import shutil
import textwrap
import unittest

from common import IS_ROOT, NOBODY, PACKAGES, ROOT, PackageTest, run

WORKFLOW = ROOT / "examples/ci/rdma-tests.yml"
CONTAINERFILE = ROOT / "examples/ci/Containerfile"
STEP = re.compile(r"^ {6}- name: (?P<name>.+)\n {8}run: (?:\|\n(?P<lines>(?: {10}.*\n)+)|(?P<line>.+)\n)", re.MULTILINE)


def steps():
    found = STEP.finditer(WORKFLOW.read_text())
    return [(step["name"], textwrap.dedent(step["lines"] or step["line"])) for step in found]


class Workflow(PackageTest):
    def test_all_steps_are_found(self):
        self.assertEqual(len(steps()), WORKFLOW.read_text().count("run: "))
        self.assertEqual([name for name, script in steps() if "sudo" in script], [steps()[0][0]])

    @unittest.skipUnless(shutil.which("ib_write_bw"), "needs perftest")
    def test_steps_run_for_an_ordinary_user(self):
        home = self.folder / "home"
        home.mkdir()
        if IS_ROOT:
            os.chown(home, 65534, 65534)
        (wheel,) = PACKAGES.glob("*.whl")
        paths = home / "paths"
        # The runner is without network here.
        variables = {"HOME": str(home), "GITHUB_PATH": str(paths), "TERRACE": shutil.copy(wheel, self.folder),
                     "PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1"}
        for name, script in steps()[1:]:
            added = paths.read_text().split("\n") if paths.exists() else []
            path = ":".join([*filter(None, added), "/usr/local/bin:/usr/bin:/bin"])
            with self.subTest(step=name):
                outcome = run(*NOBODY, "bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script, cwd=home,
                              env={**variables, "PATH": path})
                self.assertEqual(outcome.returncode, 0, outcome.stdout + outcome.stderr)


class Container(unittest.TestCase):
    def test_files_that_it_copies_exist(self):
        (pattern,) = re.findall(r"^COPY (\S+) /tmp/$", CONTAINERFILE.read_text(), re.MULTILINE)
        self.assertEqual(list(ROOT.glob(pattern)), list(PACKAGES.glob("*.whl")))


if __name__ == "__main__":
    unittest.main()
