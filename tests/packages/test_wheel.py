"""The Python wheel in build/packages/: installed by an ordinary user, used, uninstalled. `make packages-test` runs this."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import unittest
import zipfile

from common import IS_ROOT, NOBODY, PACKAGES, ROOT, TIMEOUT_S, PackageTest, build, commit_epoch, run
from test_packages import FILES, PAGES

# An ordinary user cannot use an interpreter below root's home.
PYTHON = next(path for path in ("/usr/bin/python3", sys.executable)
              if shutil.which(path) and run(*NOBODY, path, "-c", "import ensurepip, venv", cwd="/").returncode == 0)
# Libraries that manylinux wheels may expect of the system.
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
LIBRARIES = {"libibverbs.so", "libibverbs.so.1", "libterrace-pager.so"}
MODULE = {f"terrace/{name}" for name in ("__init__.py", "_native.abi3.so", "_native.pyi", "aio.py", "errors.py", "fsspec.py", "py.typed")}
OLDEST_MINOR = 9


def pythons():
    """Interpreters of this machine that the wheel is for, one for each version."""
    paths = [*sorted(pathlib.Path.home().glob(".pyenv/versions/3.*/bin/python3")), pathlib.Path(PYTHON)]
    found = {}
    for path in paths:
        outcome = run(path, "-c", "import sys; print(sys.version_info.minor)")
        if outcome.returncode == 0 and int(outcome.stdout) >= OLDEST_MINOR:
            found[int(outcome.stdout)] = path
    return found


def files_below(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


class Wheel(PackageTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        (cls.wheel,) = PACKAGES.glob("*.whl")
        cls.environment = cls.folder / "user/environment"
        cls.environment.parent.mkdir()
        if IS_ROOT:
            os.chown(cls.environment.parent, 65534, 65534)
        cls.before = cls.after_command(PYTHON, "-m", "venv", cls.environment)
        wheel = shutil.copy(cls.wheel, cls.folder)
        cls.after_command(cls.environment / "bin/pip", "install", "--quiet", "--no-index", "--no-cache-dir", wheel)
        cls.terrace = cls.environment / "bin/terrace"

    @classmethod
    def after_command(cls, *command):
        """Runs a command as an ordinary user. Returns the files in the environment then."""
        outcome = run(*NOBODY, *command, cwd="/", env=cls.variables())
        if outcome.returncode:
            raise RuntimeError(outcome.stderr)
        return files_below(cls.environment)

    @classmethod
    def variables(cls, **more):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
        return {**kept, "HOME": str(cls.folder / "user"), "PYTHONDONTWRITEBYTECODE": "1", **more}

    def test_name_and_contents(self):
        number = build.version()
        machine = os.uname().machine
        self.assertRegex(self.wheel.name, rf"^terrace_rdma-{re.escape(number)}-cp39-abi3-manylinux_\d+_\d+_{machine}\.whl$")
        with zipfile.ZipFile(self.wheel) as archive:
            names = set(archive.namelist())
            text = archive.read(f"terrace_rdma-{number}.dist-info/METADATA").decode()
        data = f"terrace_rdma-{number}.data"
        expected = {f"{data}/data/{name}" for name in FILES if name != "bin/terrace"}
        expected |= {f"{data}/data/share/man/man1/{page}" for page in PAGES}
        expected |= {f"{data}/scripts/terrace"} | MODULE
        self.assertEqual({name for name in names if ".dist-info/" not in name}, expected)
        boms = {name.rpartition("/")[2] for name in names if "/sboms/" in name}
        self.assertEqual(boms, {f"terrace-{number}.cdx.json"})
        licences = {name.rpartition("/")[2] for name in names if "/licenses/" in name}
        self.assertEqual(licences, {"LICENSE-MIT", "LICENSE-APACHE"})
        self.assertIn("Requires-Python: >=3.9\n", text)
        # Only what has to be asked for.
        self.assertEqual(re.findall("^Requires-Dist: (.*)$", text, re.MULTILINE), ["fsspec>=2023.1 ; extra == 'fsspec'"])

    def test_times_are_the_commits(self):
        expected = time.gmtime(commit_epoch())[:5]
        with zipfile.ZipFile(self.wheel) as archive:
            self.assertEqual({entry.date_time[:5] for entry in archive.infolist()}, {expected})

    def test_the_tag_is_the_glibc_that_is_needed(self):
        unpacked = self.folder / "unpacked"
        with zipfile.ZipFile(self.wheel) as archive:
            archive.extractall(unpacked)
        files = [path for path in unpacked.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]
        self.assertEqual({path.name for path in files}, {"terrace", *LIBRARIES, "_native.abi3.so"})
        self.assertIn("manylinux_{}_{}_".format(*build.glibc_of(files)), self.wheel.name)
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", self.succeed("readelf", "--dynamic", "--wide", *files))
        self.assertLessEqual(set(needed), SYSTEM_LIBRARIES | {path.name for path in files})

    def test_the_command_runs_for_an_ordinary_user(self):
        self.assertEqual(self.succeed(*NOBODY, self.terrace, "--version", cwd="/"), f"terrace {build.version()}\n")

    @unittest.skipUnless(shutil.which("ibv_rc_pingpong"), "needs ibv_rc_pingpong")
    def test_two_programs_of_an_ordinary_user_talk(self):
        program = (*NOBODY, self.terrace, "run", "--addr", "127.0.0.1", "--", "ibv_rc_pingpong", "-g", "0", "-c", "-p", "18599")
        server = subprocess.Popen([str(part) for part in program], cwd="/", stdout=subprocess.PIPE, text=True)
        try:
            # The server listens after a while.
            for _ in range(50):
                client = run(*program, "127.0.0.1", cwd="/")
                if client.returncode == 0:
                    break
                time.sleep(0.1)
            self.assertEqual(client.returncode, 0, client.stderr)
            self.assertIn("1000 iters", client.stdout)
            self.assertEqual(server.wait(TIMEOUT_S), 0)
        finally:
            server.kill()
            server.wait()
            server.stdout.close()

    def test_the_module_and_the_command_together(self):
        (fsspec,) = ROOT.glob("build/tools/lib/python3*/site-packages/fsspec")
        modules = self.folder / "modules"
        shutil.copytree(fsspec, modules / "fsspec")
        command = (self.environment / "bin/python", "-m", "unittest", "discover", "--verbose", "--start-directory", ROOT / "tests/python")
        outcome = run(*command, cwd="/", env=self.variables(TERRACE=str(self.terrace), PYTHONPATH=str(modules)))
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        # fsspec finds the file system by the wheel's entry point.
        self.assertIn("test_it_is_registered", outcome.stderr)

    def test_every_python_of_this_machine_loads_the_module(self):
        (packages,) = self.environment.glob("lib/python3.*/site-packages")
        script = "import terrace, terrace.aio; terrace.connect('127.0.0.1', path='nothing')"
        for minor, python in pythons().items():
            with self.subTest(version=f"3.{minor}"):
                self.assertIn("ValueError: path", run(python, "-c", script, env=self.variables(PYTHONPATH=str(packages))).stderr)

    def test_uninstalling_leaves_no_files(self):
        other = self.folder / "user/other"
        pip = other / "bin/pip"
        for command in ((PYTHON, "-m", "venv", other), (pip, "install", "--quiet", "--no-index", "--no-cache-dir", self.wheel.name)):
            self.succeed(*NOBODY, *command, cwd=self.folder, env=self.variables())
        self.assertTrue((other / "lib/terrace/libibverbs.so.1").exists())
        self.succeed(*NOBODY, pip, "uninstall", "--quiet", "--yes", "terrace-rdma", cwd=self.folder, env=self.variables())
        self.assertEqual(files_below(other), self.before)
        self.assertFalse((other / "lib/terrace").exists())


if __name__ == "__main__":
    unittest.main()
