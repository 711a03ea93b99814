#!/usr/bin/env python3
"""Runs xfstests over `terrace mount`, in a mount namespace of its own, for suites.py.

    unshare --mount xfstests.py DIRECTORY [ARGUMENT...]

DIRECTORY has a built xfstests. The arguments are those of its program `check`. What it leaves is in results/xfstests.

Nothing outside of the namespace changes: `mount -t fuse.terrace` finds its helper and the tests find their users because the
files of the system that name them are covered.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys

import place
from place import ROOT

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = ROOT / "results/xfstests"
# The exported directories are on a file system of their own: tests count its free blocks.
DISK_BYTES = 12 << 30
# xfstests' users. They have a group of the same name and number.
USERS = {"fsgqa": 31001, "fsgqa2": 31002, "123456-fsgqa": 31003}
# xfstests compares the type of what is mounted with "fuse".
DF = """#!/bin/bash
set -o pipefail
/bin/df "$@" | sed 's/ fuse\\.terrace / fuse /'
"""


def call(*command):
    subprocess.run([str(part) for part in command], check=True)


def cover(path, source):
    """Binds a file over one of the system's."""
    call("mount", "--bind", source, pathlib.Path(path).resolve())


@contextlib.contextmanager
def disk(base):
    """A new ext4 of DISK_BYTES, sparse, mounted at a directory."""
    image, directory = base / "image", base / "disk"
    directory.mkdir()
    with open(image, "wb") as file:
        file.truncate(DISK_BYTES)
    call("mkfs.ext4", "-q", "-F", image)
    call("mount", "-o", "loop", image, directory)
    try:
        yield directory
    finally:
        call("umount", directory)


def add_users(base):
    """Adds xfstests' users to the files that name the system's."""
    home = base / "home"
    home.mkdir(mode=0o777)
    lines = {
        "passwd": [f"{name}:*:{number}:{number}::{home}:/bin/bash\n" for name, number in USERS.items()],
        "group": [f"{name}:*:{number}:\n" for name, number in USERS.items()],
    }
    for name, added in lines.items():
        path = pathlib.Path("/etc") / name
        copy = base / name
        known = [line for line in path.read_text().splitlines(True) if line.split(":")[0] not in USERS]
        copy.write_text("".join(known + added))
        copy.chmod(0o644)
        cover(path, copy)


def configure(base, server):
    """The configuration of `check`, and its environment."""
    lines = ["export FSTYP=fuse", "export FUSE_SUBTYP=.terrace"]
    for device, point, name in (("TEST_DEV", "TEST_DIR", "test"), ("SCRATCH_DEV", "SCRATCH_MNT", "scratch")):
        (base / name).mkdir()
        lines += [f"export {device}={server}:/{name}", f"export {point}={base / name}"]
    config = base / "local.config"
    config.write_text("\n".join(lines) + "\n")
    programs = base / "bin"
    programs.mkdir()
    (programs / "df").write_text(DF)
    (programs / "df").chmod(0o755)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}:/usr/sbin:/sbin", "HOST_OPTIONS": str(config), "RESULT_BASE": str(RESULTS),
        "TERRACE": str(place.TERRACE), "TERRACE_ADDR": next(place.ADDRESSES), "LC_ALL": "C",
    }


def main():
    directory, arguments = sys.argv[1], sys.argv[2:]
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    with place.temporary() as base, disk(base) as exported:
        for name in ("test", "scratch"):
            (exported / name).mkdir(mode=0o755)
        add_users(base)
        cover("/sbin/mount.fuse", HERE / "mount.fuse")
        server = next(place.ADDRESSES)
        export = place.Export(exported, server)
        try:
            export.start()
            environment = configure(base, server)
            return subprocess.call(["./check", "-fuse", *arguments], cwd=directory, env=environment)
        finally:
            for name in ("test", "scratch"):
                subprocess.run(["umount", "--lazy", base / name], stderr=subprocess.DEVNULL, check=False)
            export.stop()


if __name__ == "__main__":
    sys.exit(main())
