"""The packages in the root of a freshly installed system, without network and without a compiler: an ordinary user runs two
programs within a minute, and uninstalling leaves nothing. `make packages-test` runs this as root, if debootstrap can make a root.
"""

import os
import pathlib
import re
import shutil
import subprocess
import time
import unittest

from common import IS_ROOT, PACKAGES, ROOT, PackageTest

# Debian 12 and 13, Ubuntu 24.04.
SUITES = ("bookworm", "trixie", "noble")
UBUNTU = ("noble",)
# debootstrap's script of all releases of Ubuntu, under the name of an old one.
UBUNTU_SCRIPT = pathlib.Path("/usr/share/debootstrap/scripts/gutsy")
ROOTS = ROOT / "build/roots"
MINUTE_S = 60
# perftest is what the user has already; ensurepip is what `python3 -m venv` needs.
INCLUDED = "perftest,python3-venv,iproute2"
DEBOOTSTRAP_LIMIT_S = 600
# Runs a script in the root below a layer that is thrown away: bash -c INSIDE SCRIPT ROOT UPPER WORK MERGED PACKAGES.
INSIDE = """
set -e
ip link set lo up
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$3" "$4"
mount -t proc proc "$4/proc"
mount -t tmpfs -o mode=1777 tmpfs "$4/tmp"
mount -t tmpfs -o mode=1777 tmpfs "$4/dev/shm"
mkdir "$4/tmp/packages" "$4/tmp/home"
cp "$5"/* "$4/tmp/packages"
chown 1000:1000 "$4/tmp/home"
exec chroot "$4" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp/home bash -e -c "$0"
"""
AS_USER = "setpriv --reuid=1000 --regid=1000 --clear-groups --bounding-set=-all --no-new-privs --"
# The server listens after a while; perftest's client does not wait for it.
TALK = """
cd /tmp/home
USER_RUNS run --addr 127.0.0.1 -- ib_write_bw -F > server 2>&1 &
for attempt in $(seq 100); do
    if USER_RUNS run --addr 127.0.0.1 -- ib_write_bw -F 127.0.0.1; then break; fi
    [ "$attempt" != 100 ]
    sleep 0.1
done
wait $!
"""
DEB = f"""
if command -v cc gcc cargo; then echo there is a compiler; exit 1; fi
dpkg --install /tmp/packages/*.deb
{TALK.replace("USER_RUNS", AS_USER + " terrace")}
man_pages=$(ls /usr/share/man/man1/terrace*); echo "$man_pages"
dpkg --purge terrace
"""
WHEEL = f"""
cd /tmp/home
{AS_USER} python3 -m venv environment
find environment -type f -o -type l | grep -v __pycache__ | sort > before
{AS_USER} environment/bin/pip install --quiet --no-index --no-cache-dir /tmp/packages/*.whl
{TALK.replace("USER_RUNS", AS_USER + " environment/bin/terrace")}
{AS_USER} environment/bin/python -c 'import terrace; print(terrace.__name__)'
{AS_USER} environment/bin/pip uninstall --quiet --yes terrace-rdma
find environment -type f -o -type l | grep -v __pycache__ | sort | diff before -
"""


def archive_of(suite):
    """The options and arguments by which debootstrap finds a release that is not the machine's own distribution's."""
    if suite not in UBUNTU:
        return (), ()
    archive = re.search(r"default_mirror http://(archive\S+)", UBUNTU_SCRIPT.read_text())[1]
    # perftest is in `universe`. Debian 12 has no keyring of Ubuntu's archive: TLS vouches for it.
    return ("--components=main,universe", "--no-check-gpg"), (f"https://{archive}", str(UBUNTU_SCRIPT))


def root_of(suite):
    """The root of a release, made once. Raises `SkipTest` with the reason where it cannot be made."""
    root = ROOTS / suite
    if not (ROOTS / f"{suite}.complete").exists():
        if shutil.which("debootstrap") is None:
            raise unittest.SkipTest("needs debootstrap")
        shutil.rmtree(root, ignore_errors=True)
        ROOTS.mkdir(parents=True, exist_ok=True)
        options, archive = archive_of(suite)
        command = ("debootstrap", "--variant=minbase", f"--include={INCLUDED}", *options, suite, str(root), *archive)
        made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEBOOTSTRAP_LIMIT_S)
        if made.returncode != 0:
            raise unittest.SkipTest(f"debootstrap cannot make {suite}: {made.stdout.strip().splitlines()[-1]}")
        (ROOTS / f"{suite}.complete").touch()
    return root


@unittest.skipUnless(IS_ROOT, "only root can make a root")
class Roots(PackageTest):
    def in_root(self, suite, script):
        """Runs a script as root in a fresh root. Returns its output, the seconds, and the layer of what it has left."""
        root = root_of(suite)
        layer = self.folder / f"{suite}-{time.monotonic_ns()}"
        parts = [layer / name for name in ("upper", "work", "merged")]
        for part in parts:
            part.mkdir(parents=True)
        started = time.monotonic()
        command = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "bash", "-c", INSIDE, script, root, *parts, PACKAGES)
        printed = self.succeed(*command)
        return printed, time.monotonic() - started, parts[0]

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # An overlay's folders may have no space or comma in their paths.
        cls.folder = pathlib.Path(str(cls.folder).replace(" ", "-"))
        cls.folder.mkdir()
        cls.addClassCleanup(shutil.rmtree, cls.folder)

    def test_the_debian_package(self):
        for suite in SUITES:
            with self.subTest(suite=suite):
                printed, seconds, left = self.in_root(suite, DEB)
                self.assertRegex(printed, r"\n 65536 +\d+ +\d+\.\d+")
                self.assertLess(seconds, MINUTE_S)
                files = {path.relative_to(left) for path in left.rglob("*") if not path.is_dir()}
                # What dpkg, ld.so and the user database of the system itself keep of every package. The user of the service stays.
                users = r"etc/(passwd|group|shadow|gshadow)-?$|etc/\.pwd\.lock$"
                own = re.compile(rf"var/lib/dpkg/|var/log/|var/cache/|var/lib/systemd/|etc/ld.so.cache|{users}")
                self.assertEqual([str(path) for path in files if not own.match(str(path))], [])
                status = (left / "var/lib/dpkg/status").read_text()
                self.assertNotIn("Package: terrace\n", status)

    def test_the_wheel(self):
        for suite in SUITES:
            with self.subTest(suite=suite):
                printed, seconds, _ = self.in_root(suite, WHEEL)
                self.assertRegex(printed, r"\n 65536 +\d+ +\d+\.\d+")
                self.assertIn("\nterrace\n", printed)
                self.assertLess(seconds, MINUTE_S)


if __name__ == "__main__":
    unittest.main()
