"""The Debian package and the tarball in build/packages/: their contents, an installation and run; a second build of all packages
with the same bytes.

`make packages-test` runs this.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import unittest

from common import IS_ROOT, NOBODY, PACKAGES, ROOT, TIMEOUT_S, PackageTest, build, commit_epoch, modes_below, run

# The commands that the help lists.
COMMANDS = tuple(name for name in re.findall(r"^  ([a-z-]+) +[A-Z]", run(ROOT / "build/bin/terrace", "--help").stdout, re.MULTILINE)
                 if name != "help")
# Below the prefix, in all packages.
FILES = {
    "bin/terrace": 0o755,
    "include/infiniband/terrace_dv.h": 0o644,
    "include/infiniband/terrace_exp.h": 0o644,
    "include/terrace.h": 0o644,
    "include/terrace_export.h": 0o644,
    "lib/pkgconfig/terrace.pc": 0o644,
    "lib/terrace/libibverbs.so": 0o644,
    "lib/terrace/libibverbs.so.1": 0o644,
    "lib/terrace/libterrace-pager.so": 0o644,
    "share/bash-completion/completions/terrace": 0o644,
    "share/zsh/vendor-completions/_terrace": 0o644,
    "share/fish/vendor_completions.d/terrace.fish": 0o644,
    "share/doc/terrace/copyright": 0o644,
    "share/doc/terrace/third-party-licenses.gz": 0o644,
}
PAGES = ("terrace.1", *(f"terrace-{command}.1" for command in COMMANDS), "terrace-bench-demo-term.1", "terrace-bench-flush.1")
DEB_FILES = {
    **FILES,
    **{f"share/man/man1/{page}.gz": 0o644 for page in PAGES},
    "lib/systemd/system/terrace-serve@.service": 0o644,
    "lib/sysusers.d/terrace.conf": 0o644,
    "share/doc/terrace/changelog.gz": 0o644,
    "share/doc/terrace/examples/example.conf": 0o644,
}
TARBALL_FILES = {
    **FILES,
    **{f"share/man/man1/{page}": 0o644 for page in PAGES},
    **{name: 0o644 for name in ("README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE")},
}


class Packages(PackageTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        (cls.deb,), (cls.tarball,) = PACKAGES.glob("*.deb"), PACKAGES.glob("*.tar.gz")
        cls.root = cls.folder / "root"
        subprocess.run(["dpkg-deb", "--extract", cls.deb, cls.root], check=True)
        subprocess.run(["tar", "--extract", "--file", cls.tarball, "--directory", cls.folder], check=True)
        cls.unpacked = cls.folder / cls.tarball.name.removesuffix(".tar.gz")

    def test_files_and_modes(self):
        self.assertEqual(modes_below(self.root), {f"usr/{name}": mode for name, mode in DEB_FILES.items()})
        self.assertEqual(modes_below(self.unpacked), TARBALL_FILES)

    def test_owners_are_root_and_times_are_the_commits(self):
        epoch = commit_epoch()
        archived = subprocess.run(["dpkg-deb", "--fsys-tarfile", self.deb], check=True, stdout=subprocess.PIPE).stdout
        data = self.folder / "data.tar"
        data.write_bytes(archived)
        for path in (data, self.tarball):
            with tarfile.open(path) as archive:
                for member in archive:
                    with self.subTest(package=path.name, file=member.name):
                        self.assertEqual((member.uid, member.gid, member.mtime), (0, 0, epoch))

    def test_names_are_sorted(self):
        with tarfile.open(self.tarball) as archive:
            names = [pathlib.PurePath(name) for name in archive.getnames()]
        self.assertEqual(names, sorted(names))

    def test_control(self):
        fields = dict(re.findall(r"^(\S+): (.*)$", self.succeed("dpkg-deb", "--field", self.deb), re.MULTILINE))
        self.assertEqual(self.deb.name, f"terrace_{fields['Version']}_{fields['Architecture']}.deb")
        needed = [entry.split()[0] for entry in fields["Depends"].split(", ")]
        self.assertEqual(sorted(needed), ["libc6", "libgcc-s1"])
        self.assertEqual(self.succeed("dpkg-deb", "--info", self.deb).count(" script"), 0)

    def test_checksums_of_installed_files(self):
        listed = self.succeed("dpkg-deb", "--info", self.deb, "md5sums").splitlines()
        self.assertEqual({line.split("  ", 1)[1] for line in listed}, {f"usr/{name}" for name in DEB_FILES})

    def test_a_second_build_gives_the_same_bytes(self):
        again = self.folder / "again"
        subprocess.run([sys.executable, ROOT / "packaging/build.py", again], check=True, stderr=subprocess.PIPE)
        for path in sorted(PACKAGES.iterdir()):
            with self.subTest(package=path.name):
                self.assertEqual(path.read_bytes(), (again / path.name).read_bytes())

    def test_the_command_runs(self):
        for prefix in (self.root / "usr", self.unpacked):
            with self.subTest(prefix=prefix.name):
                terrace = prefix / "bin/terrace"
                self.assertEqual(self.succeed(*NOBODY, terrace, "--version", cwd="/"), f"terrace {build.version()}\n")
                devices = json.loads(self.succeed(*NOBODY, terrace, "devices", "--addr", "127.0.0.1", "--json", cwd="/"))
                self.assertEqual([device["name"] for device in devices["devices"]], ["terrace0"])

    @unittest.skipUnless(shutil.which("ibv_devinfo"), "needs ibv_devinfo")
    def test_a_program_runs_for_an_ordinary_user_from_a_path_with_a_space(self):
        self.assertIn(" ", str(self.unpacked))
        for prefix in (self.root / "usr", self.unpacked):
            with self.subTest(prefix=prefix.name):
                printed = self.succeed(*NOBODY, prefix / "bin/terrace", "run", "--addr", "127.0.0.1", "--", "ibv_devinfo", cwd="/")
                self.assertIn("terrace0", printed)
                self.assertIn("PORT_ACTIVE", printed)

    @unittest.skipUnless(shutil.which("pkg-config") and shutil.which("cc"), "needs pkg-config and a compiler")
    def test_a_program_is_compiled_and_linked_by_pkg_config(self):
        for prefix in (self.root / "usr", self.unpacked):
            with self.subTest(prefix=prefix.name):
                environment = {**os.environ, "PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
                self.assertEqual(self.succeed("pkg-config", "--modversion", "terrace", env=environment), f"{build.version()}\n")
                options = shlex.split(self.succeed("pkg-config", "--cflags", "--libs", "terrace", env=environment))
                program = self.folder / "export_client"
                self.succeed("cc", "-o", program, ROOT / "examples/export_client.c", *options)
                # It loads the library where it is installed, without the command.
                library = re.search(r"libibverbs\.so\.1 => (.*) \(", self.succeed("ldd", program))[1]
                self.assertTrue(os.path.samefile(library, prefix / "lib/terrace/libibverbs.so.1"), library)

    def test_man_pages(self):
        for page in PAGES:
            with self.subTest(page=page):
                text = (self.unpacked / "share/man/man1" / page).read_text()
                self.assertIn(".SH NAME", text)
                self.assertIn(".SH OPTIONS", text)

    def test_completions(self):
        for name in (name for name in FILES if "completions" in name):
            script = (self.unpacked / name).read_text()
            for command in COMMANDS:
                with self.subTest(script=name, command=command):
                    self.assertRegex(script, rf"\b{command}\b")
        script = self.unpacked / "share/bash-completion/completions/terrace"
        ask = 'source "$0"; COMP_WORDS=(terrace se); COMP_CWORD=1; _terrace terrace se terrace; echo "${COMPREPLY[@]}"'
        self.assertEqual(self.succeed("bash", "-c", ask, script), "serve\n")

    @unittest.skipUnless(IS_ROOT, "needs to lock memory")
    def test_the_example_configuration_serves(self):
        text = (self.root / "usr/share/doc/terrace/examples/example.conf").read_text()
        options = shlex.split(re.search(r"^OPTIONS=(.*)$", text, re.MULTILINE)[1])
        with tempfile.TemporaryDirectory() as state:
            server = subprocess.Popen([self.root / "usr/bin/terrace", "serve", *options, "--listen", "127.0.0.1"], cwd=state,
                                      stdout=subprocess.PIPE, text=True)
            try:
                self.assertIn("serving at 127.0.0.1", server.stdout.readline())
            finally:
                server.send_signal(signal.SIGTERM)
                status = server.wait(TIMEOUT_S)
                server.stdout.close()
            self.assertEqual(status, 0)

    @unittest.skipUnless(shutil.which("systemd-analyze"), "needs systemd-analyze")
    def test_the_unit_is_valid(self):
        unit = (self.root / "usr/lib/systemd/system/terrace-serve@.service").read_text()
        # The command is not installed here.
        path = self.folder / "terrace-serve@test.service"
        path.write_text(unit.replace("ExecStart=/usr/bin/terrace ", "ExecStart=/bin/true "))
        self.assertEqual(run("systemd-analyze", "verify", "--man=no", path).stderr, "")

    def test_the_unit_leaves_the_pages_of_a_killed_server_to_the_next_one(self):
        """systemd removes what a dynamic user has in /dev/shm, as it does with RemoveIPC=."""
        unit = (self.root / "usr/lib/systemd/system/terrace-serve@.service").read_text()
        settings = [line for line in unit.splitlines() if not line.startswith("#")]
        self.assertIn("User=terrace", settings)
        self.assertFalse([line for line in settings if re.match("DynamicUser=|RemoveIPC=", line)])

    def test_the_unit_gives_a_server_time_to_write_its_pages(self):
        """systemd's default of 90 s is less than half of a large budget takes, and a shutdown loses the rest."""
        unit = (self.root / "usr/lib/systemd/system/terrace-serve@.service").read_text()
        self.assertIn("\nTimeoutStopSec=1h\n", unit)

    @unittest.skipUnless(IS_ROOT, "dpkg installs as root only")
    def test_installation_and_removal_leave_no_files(self):
        with tempfile.TemporaryDirectory() as root:
            database = pathlib.Path(root, "var/lib/dpkg")
            for name in ("info", "updates"):
                (database / name).mkdir(parents=True)
            # The packages of this machine count as installed, so that dependencies are checked.
            shutil.copy("/var/lib/dpkg/status", database)
            # There is no shell in this root: the script that makes a user runs outside of it.
            pathlib.Path(root, "etc").mkdir()
            self.succeed("dpkg", f"--root={root}", "--force-script-chrootless", "--install", self.deb)
            self.assertEqual(set(modes_below(pathlib.Path(root, "usr"))), set(DEB_FILES))
            if shutil.which("systemd-sysusers"):
                self.assertIn("\nterrace:", pathlib.Path(root, "etc/passwd").read_text())
            self.succeed("dpkg", f"--root={root}", "--purge", "terrace")
            self.assertFalse(pathlib.Path(root, "usr").exists())
            self.assertEqual(list((database / "info").glob("terrace.*")), [])


if __name__ == "__main__":
    unittest.main()
