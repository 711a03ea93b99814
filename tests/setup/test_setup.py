"""scripts/setup.sh on systems with apt-get, with dnf and with neither, as root and as another user. Package managers are fakes that
write down what they are asked for."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/setup.sh"
TOOLS = ("sh", "cat", "cut", "dirname", "env", "grep", "head", "mktemp", "rm", "sed", "sort", "tail")
TARGET = "build"
# What the target needs beside Rust.
DEBIAN = ("gcc", "libc6-dev", "make")


class Setup(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        for tool in TOOLS:
            (self.folder / tool).symlink_to(shutil.which(tool))
        self.log = self.folder / "log"
        self.log.touch()
        self.fake_program("cargo", "echo cargo 99.0.0")

    def fake_program(self, name, script):
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def manager(self, name, installed=(), uid=0, status=0):
        """A package manager, and its list of what is installed."""
        self.fake_program(name, f'echo "{name} $*" >> {self.log}; exit {status}')
        cases = "|".join(installed) or "nothing"
        self.fake_program("dpkg-query", f'for last; do :; done; case $last in {cases}) printf installed ;; *) exit 1 ;; esac')
        self.fake_program("rpm", f'for last; do :; done; case $last in {cases}) exit 0 ;; *) exit 1 ;; esac')
        self.fake_program("id", f"echo {uid}")

    def run_setup(self):
        variables = {"PATH": str(self.folder), "HOME": str(self.folder), "TMPDIR": str(self.folder)}
        outcome = subprocess.run(["sh", str(SCRIPT), TARGET], env=variables, capture_output=True, text=True, timeout=60)
        return outcome, self.log.read_text().splitlines()

    def test_debian_is_asked_for_what_is_missing(self):
        self.manager("apt-get", installed=("gcc",))
        outcome, asked = self.run_setup()
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        self.assertEqual(asked, ["apt-get install -y --no-install-recommends libc6-dev make"])

    def test_fedora_has_names_of_its_own(self):
        self.manager("dnf", installed=("gcc",))
        outcome, asked = self.run_setup()
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        self.assertEqual(asked, ["dnf install -y --setopt=install_weak_deps=False glibc-devel make"])

    def test_nothing_is_asked_for_if_nothing_is_missing(self):
        for manager, installed in (("apt-get", DEBIAN), ("dnf", ("gcc", "glibc-devel", "make"))):
            with self.subTest(manager=manager):
                (self.folder / manager).unlink(missing_ok=True)
                self.manager(manager, installed, uid=1000)
                outcome, asked = self.run_setup()
                self.assertEqual((outcome.returncode, outcome.stdout, outcome.stderr, asked), (0, "", "", []))
                (self.folder / manager).unlink()

    def test_another_user_is_told_what_root_has_to_do(self):
        self.manager("apt-get", installed=("gcc",), uid=1000)
        outcome, asked = self.run_setup()
        self.assertEqual((outcome.returncode, asked), (1, []))
        self.assertEqual(outcome.stderr,
                         "setup: only root can install packages: as root, run: apt-get install libc6-dev make\n")

    def test_another_user_with_sudo(self):
        self.manager("apt-get", installed=DEBIAN[:2], uid=1000)
        self.fake_program("sudo", f'echo "sudo $*" >> {self.log}; exec "$@"')
        outcome, asked = self.run_setup()
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        self.assertTrue(asked[0].startswith("sudo ") and asked[0].endswith(" make"), asked)

    def test_a_failure_updates_the_list_and_is_told(self):
        self.manager("apt-get", installed=DEBIAN[:2], status=1)
        outcome, asked = self.run_setup()
        self.assertEqual(outcome.returncode, 1)
        self.assertIn("apt-get could not install make", outcome.stderr)
        self.assertEqual([line.split()[1] for line in asked], ["install", "update", "install"])

    def test_another_system(self):
        self.fake_program("id", "echo 0")
        outcome, _ = self.run_setup()
        self.assertEqual(outcome.returncode, 1)
        self.assertIn("neither apt-get nor dnf: install by hand, by Debian's names: gcc libc6-dev make", outcome.stderr)


if __name__ == "__main__":
    unittest.main()
