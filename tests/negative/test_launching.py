"""What `terrace run` does for programs that a preloaded library alone does not serve."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from support import PROGRAMS, TERRACE, USAGE, NegativeTest, assert_refused, fresh_address, procs

PROGRAM_SOURCES = pathlib.Path(__file__).with_name("programs")
FOLDER = TERRACE.parents[1] / "lib/terrace"
IN_OWN_NAMESPACE = ("unshare", "--map-root-user", "--mount")
IN_OWN_PIDS = ("unshare", "--map-root-user", "--pid", "--fork", "--mount-proc")


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


class Sysfs(Launching):
    """The device's files, which a process makes when it first looks for them."""

    def trees(self, pid):
        return [tree for place in ("/dev/shm", "/tmp") for tree in pathlib.Path(place).glob("terrace-sysfs.*")
                if str(pid) in tree.name.split(".")]

    @unittest.skipUnless(run(*IN_OWN_PIDS, "true").returncode == 0, "no user or PID name spaces here")
    def test_a_process_of_another_pid_namespace_leaves_them(self):
        """Containers may share the directory, where all look like processes that have ended."""
        look = "import os, sys; print(os.listdir('/sys/class/infiniband'), flush=True); sys.stdin.read()"
        command = procs.under_terrace([sys.executable, "-c", look], addr=fresh_address())
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            self.assertEqual(program.stdout.readline(), "['terrace0']\n")
            trees = self.trees(program.pid)
            self.assertEqual(len(trees), 1)
            outcome = self.terrace("ls", "/sys/class/infiniband", before=IN_OWN_PIDS)
            self.assertEqual((outcome.returncode, outcome.stdout), (0, "terrace0\n"), outcome.stderr)
            self.assertEqual(self.trees(program.pid), trees)
        self.assertEqual(self.trees(program.pid), [])
        # A killed process's are removed by the next one.
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            self.assertEqual(program.stdout.readline(), "['terrace0']\n")
            program.kill()
        self.assertEqual(len(self.trees(program.pid)), 1)
        self.terrace("ls", "/sys/class/infiniband")
        self.assertEqual(self.trees(program.pid), [])


class Sanitized(Launching):
    """Programs with gcc's AddressSanitizer, whose runtime wants to be the first library."""

    def build(self, name):
        program = self.directory / name
        sources = (PROGRAM_SOURCES / f"{name}.c", PROGRAM_SOURCES / "env.c")
        built = run("gcc", "-g", "-D_GNU_SOURCE", "-fsanitize=address", "-o", program, *sources, "-libverbs", "-lpthread")
        self.assertEqual(built.returncode, 0, built.stderr)
        return program

    def test_it_finds_no_errors_and_no_leaks(self):
        """Started by `terrace run`, and by a program that it starts."""
        program = self.build("verbs_device")
        for before in ((), ("sh", "-c", '"$0"; exit "$?"')):
            with self.subTest(before):
                outcome = self.terrace(*before, program)
                self.assertEqual((outcome.returncode, outcome.stderr), (0, ""))
                self.assertIn(" 0 failed", outcome.stdout)

    def test_it_reports_errors_and_leaks(self):
        program = self.build("faulty")
        for mistake, report in (("overflow", "heap-buffer-overflow"), ("null", "SEGV on unknown address"), ("leak", "detected memory leaks")):
            with self.subTest(mistake):
                outcome = self.terrace(program, mistake)
                self.assertEqual(outcome.returncode, 1)
                self.assertIn(report, outcome.stderr)


class Static(Launching):
    """Programs that a library cannot be preloaded into."""

    def test_the_programs_that_it_starts_have_the_device(self):
        source, launcher = self.directory / "launcher.c", self.directory / "launcher"
        source.write_text("#include <unistd.h>\nint main(int n, char **v) { return n > 1 ? execvp(v[1], v + 1) : 0; }\n")
        built = run("gcc", "-static", "-o", launcher, source)
        if built.returncode != 0:
            self.skipTest(f"no static C library here: {built.stderr}")
        outcome = self.terrace(launcher, PROGRAMS / "loader", "libibverbs.so")
        warning = f"terrace: {launcher} is statically linked, so it sees no RDMA device; programs that it starts do\n"
        self.assertEqual((outcome.returncode, outcome.stdout, outcome.stderr), (0, "terrace0\n", warning))

    @unittest.skipUnless(os.geteuid() == 0, "only root makes files of other users")
    def test_rights_of_a_file(self):
        program = pathlib.Path(shutil.copy("/bin/true", self.directory))
        os.chown(program, 65534, 65534)
        program.chmod(0o4755)
        outcome = self.terrace(program)
        self.assertEqual((outcome.returncode, outcome.stdout, outcome.stderr.count("\n")), (0, "", 1))
        self.assertIn("gets rights from its file", outcome.stderr)

    def test_musl(self):
        """A loader of musl's name is enough: the program is not executed."""
        program = self.directory / "musl"
        source = self.directory / "main.c"
        source.write_text("int main(void) { return 0; }\n")
        built = run("gcc", "-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1", "-o", program, source)
        self.assertEqual(built.returncode, 0, built.stderr)
        assert_refused(self, self.terrace(program), 126, "is linked with musl")


class DeviceName(Launching):
    """`--device-name`, for programs that look for a name."""

    def test_the_name_is_the_same_everywhere(self):
        attributes = "/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0"
        for command, text in (((PROGRAMS / "loader", "libibverbs.so.1"), "mlx5_0\n"),
                              (("ls", "/sys/class/infiniband"), "mlx5_0\n"),
                              (("cat", "/sys/class/infiniband_verbs/uverbs0/ibdev"), "mlx5_0\n"),
                              (("readlink", "-f", "/sys/class/infiniband/mlx5_0"), "/sys/devices/virtual/infiniband/mlx5_0\n"),
                              (("cat", attributes), "RoCE v2\n"),
                              (("stat", "--format=%F", "/dev/infiniband/mlx5_0"), "character special file\n")):
            with self.subTest(command):
                self.assert_prints(self.terrace(*command, options=("--device-name", "mlx5_0")), text)
        found = self.terrace("ibv_devinfo", "-d", "mlx5_0", options=("--device-name", "mlx5_0"))
        self.assertIn("hca_id:\tmlx5_0\n", found.stdout)
        self.assertEqual(self.terrace("ls", "/sys/class/infiniband/terrace0", options=("--device-name", "mlx5_0")).returncode, 2)
        devices = run(TERRACE, "devices", "--addr", "127.0.0.1", "--device-name", "mlx5_0", "--json")
        self.assertEqual([device["name"] for device in json.loads(devices.stdout)["devices"]], ["mlx5_0"])

    def test_names_that_no_device_can_have(self):
        for name in ("", ".", "a/b", "_0", "a b", "m" * 64):
            with self.subTest(name):
                outcome = self.terrace("true", options=(f"--device-name={name}",))
                self.assertEqual(outcome.returncode, USAGE)
                self.assertIn("device name", outcome.stderr)

    def test_a_wrong_variable_is_reported_when_the_device_is_opened(self):
        variables = {**os.environ, "LD_PRELOAD": str(FOLDER / "libibverbs.so.1"), "TERRACE_DEVICE_NAME": "a/b"}
        outcome = subprocess.run(["ibv_devinfo"], env=variables, capture_output=True, text=True, timeout=60)
        self.assertNotEqual(outcome.returncode, 0)
        self.assertIn("terrace: TERRACE_DEVICE_NAME is `a/b`, which is not a device name", outcome.stderr)


class Paths(Launching):
    """Files whose names are no text."""

    def test_captures_and_fault_plans(self):
        capture, plan = (self.directory / os.fsdecode(name) for name in (b"\xff.pcap", b"\xff.toml"))
        plan.write_text("loss = 0.5\n")
        outcome = self.terrace("ibv_devinfo", options=("--pcap", capture, "--fault-plan", plan))
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        self.assertTrue(capture.exists())
        self.assertIn("has injected: nothing", outcome.stderr)


if __name__ == "__main__":
    unittest.main()
