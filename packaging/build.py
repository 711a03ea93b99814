#!/usr/bin/env python3
"""Builds a Debian package, a tarball, a Python wheel, a list of their crates and checksums from the files of `make install`:

    build.py [--sign KEY] FOLDER

dpkg-deb and maturin pack a finished folder, so all packages contain the same installation. The same commit, compiler and source folder
give the same bytes: times are the last commit's, owners are root, names are sorted.
"""

import argparse
import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from datetime import datetime, timezone
from email.utils import format_datetime

import notices
import sbom

ROOT = pathlib.Path(__file__).resolve().parents[1]
HERE = ROOT / "packaging"
MATURIN = ROOT / "build/tools/bin/maturin"
# crates/python/pyproject.toml names the folder.
WHEEL_DATA = ROOT / "build/python/terrace_rdma.data"
MAINTAINER = "Terrace maintainers <maintainers@users.noreply.a-seed-a8c5e44a.example>"
# What a signature is for; `ssh-keygen -Y verify` has to name it.
NAMESPACE = "terrace-packages"
CONTROL = """\
Package: terrace
Version: {version}
Architecture: {architecture}
Maintainer: {maintainer}
Installed-Size: {size_kib}
Depends: {depends}
Suggests: fuse3, ibverbs-utils, perftest, rdmacm-utils
Section: net
Priority: optional
Description: RDMA without RDMA hardware
 "terrace run -- PROGRAM" gives an unmodified libibverbs program a working RDMA
 NIC. The NIC is in the program's own process, entirely in user space, and
 speaks RoCEv2 over UDP. There is no kernel module and no daemon.
 .
 "terrace serve" exports files as memory regions that may be larger than
 memory.
"""


def output_of(*command, **keywords):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **keywords).stdout.strip()


def make(*arguments):
    # The variables of the calling make are removed, because they are only for its own children.
    variables = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    subprocess.run(["make", "--no-print-directory", *arguments], cwd=ROOT, check=True, env=variables, stdout=sys.stderr)


def version():
    metadata = output_of("cargo", "metadata", "--no-deps", "--locked", "--format-version", "1", cwd=ROOT)
    return next(package["version"] for package in json.loads(metadata)["packages"] if package["name"] == "terrace-cli")


def write_gzip(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as archive:
        archive.write(data)


def debian_changelog(text, epoch):
    """CHANGELOG.md, whose sections are `## VERSION` and have lists, in Debian's format."""
    date = format_datetime(datetime.fromtimestamp(epoch, timezone.utc))
    entries = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, body = section.split("\n", 1)
        changes = (textwrap.fill(" ".join(change.split()), 78, initial_indent="  * ", subsequent_indent="    ")
                   for change in re.findall(r"^- (.+(?:\n  .+)*)", body, re.MULTILINE))
        entries.append(f"terrace ({heading.split()[0]}) unstable; urgency=medium\n\n" + "\n".join(changes)
                       + f"\n\n -- {MAINTAINER}  {date}\n")
    return "\n".join(entries)


def install(tree, third_party):
    """Creates the installation of all packages, below `tree`/usr."""
    make("install", f"DESTDIR={tree}", "PREFIX=/usr")
    usr = tree / "usr"
    libraries = sorted(path for path in (usr / "lib/terrace").iterdir() if path.is_file() and not path.is_symlink())
    for path in (usr / "bin/terrace", *libraries):
        subprocess.run(["strip", "--strip-unneeded", "--remove-section=.comment", path], check=True)
    # Debian Policy requires that libraries are not executable.
    for path in libraries:
        path.chmod(0o644)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    subprocess.run([target / "release/examples/manual", usr], cwd=ROOT, check=True)
    documents = usr / "share/doc/terrace"
    documents.mkdir(parents=True)
    shutil.copy(HERE / "copyright", documents)
    write_gzip(documents / "third-party-licenses.gz", third_party.encode())


def set_modes_and_times(tree, epoch):
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def dependencies(tree):
    """The packages of the shared libraries that the executables need, with the versions that their symbols need."""
    # dpkg-shlibdeps expects a source package's control file, and the folder that marks the root of a package.
    (tree.parent / "control").write_text("Source: terrace\n\nPackage: terrace\nArchitecture: any\n")
    (tree / "DEBIAN").mkdir()
    executables = [tree / "usr/bin/terrace", *sorted((tree / "usr/lib/terrace").iterdir())]
    return output_of("dpkg-shlibdeps", "-O", *map(str, executables), cwd=tree.parents[1]).split("=", 1)[1]


def build_deb(tree, out, number, epoch):
    usr = tree / "usr"
    documents = usr / "share/doc/terrace"
    for page in sorted((usr / "share/man/man1").iterdir()):
        write_gzip(page.with_name(page.name + ".gz"), page.read_bytes())
        page.unlink()
    write_gzip(documents / "changelog.gz", debian_changelog((ROOT / "CHANGELOG.md").read_text(), epoch).encode())
    units = usr / "lib/systemd/system"
    units.mkdir(parents=True)
    shutil.copy(HERE / "terrace-serve@.service", units)
    (usr / "lib/sysusers.d").mkdir()
    shutil.copy(HERE / "terrace.sysusers", usr / "lib/sysusers.d/terrace.conf")
    (documents / "examples").mkdir()
    shutil.copy(HERE / "example.conf", documents / "examples")

    files = sorted(path for path in usr.rglob("*") if path.is_file())
    sums = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(tree)}\n" for path in files]
    architecture = output_of("dpkg", "--print-architecture")
    size_kib = sum(-(-path.stat().st_size // 1024) for path in files)
    control = CONTROL.format(version=number, architecture=architecture, maintainer=MAINTAINER, size_kib=size_kib,
                             depends=dependencies(tree))
    (tree / "DEBIAN/control").write_text(control)
    shutil.copy(HERE / "postinst", tree / "DEBIAN")
    (tree / "DEBIAN/md5sums").write_text("".join(sums))
    set_modes_and_times(tree, epoch)
    package = out / f"terrace_{number}_{architecture}.deb"
    # One thread is used, because the compressor's block boundaries may depend on the number of threads.
    output_of("dpkg-deb", "--root-owner-group", "-Zxz", "--threads-max=1", "--build", str(tree), str(package),
              env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)})
    return package


def build_tarball(usr, out, number, epoch):
    """Packs the same installation for use in any folder."""
    folder = usr.with_name(f"terrace-{number}-{os.uname().machine}")
    usr.rename(folder)
    for name in ("README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"):
        shutil.copy(ROOT / name, folder)
    set_modes_and_times(folder, epoch)
    package = out / f"{folder.name}.tar.gz"
    archive = subprocess.run(
        ["tar", "--create", "--sort=name", "--format=gnu", "--owner=0", "--group=0", "--numeric-owner", folder.name],
        cwd=folder.parent, check=True, stdout=subprocess.PIPE).stdout
    write_gzip(package, archive)
    return package


def glibc_of(paths):
    """The newest version of glibc whose symbols the executables need."""
    versions = output_of("readelf", "--version-info", "--wide", *map(str, paths))
    return max((int(major), int(minor)) for major, minor in re.findall(r"\bGLIBC_(\d+)\.(\d+)", versions))


def build_wheel(usr, out, crates, epoch):
    """Packs the same installation as data of a Python package: pip installs it below the environment's prefix."""
    shutil.rmtree(WHEEL_DATA, ignore_errors=True)
    shutil.copytree(usr, WHEEL_DATA / "data")
    (WHEEL_DATA / "data/bin").rename(WHEEL_DATA / "scripts")
    set_modes_and_times(WHEEL_DATA, epoch)
    executables = [WHEEL_DATA / "scripts/terrace", *sorted((WHEEL_DATA / "data/lib/terrace").iterdir())]
    # maturin verifies this of the module.
    tag = "manylinux_{}_{}".format(*glibc_of(executables))
    command = (ROOT / "scripts/release.sh", "--manifest-path", ROOT / "crates/python/Cargo.toml", "--compatibility", tag,
               "--sbom-include", crates, "--out", out)
    variables = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "TERRACE_BUILDER": str(MATURIN)}
    subprocess.run(command, cwd=ROOT, check=True, env=variables, stdout=sys.stderr)
    (wheel,) = out.glob("*.whl")
    return wheel


def build(out):
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or output_of("git", "log", "-1", "--format=%ct", cwd=ROOT))
    number = version()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work:
        deb, tarball = pathlib.Path(work, "debian/terrace"), pathlib.Path(work, "tarball")
        install(deb, notices.text())
        shutil.copytree(deb / "usr", tarball / "usr", symlinks=True)
        crates = out / f"terrace-{number}.cdx.json"
        crates.write_text(sbom.text(number))
        packages = [
            crates,
            build_wheel(deb / "usr", out, crates, epoch),
            build_tarball(tarball / "usr", out, number, epoch),
            build_deb(deb, out, number, epoch),
        ]
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(packages))
    (out / "SHA256SUMS").write_text("".join(sums))


def sign(sums, key):
    """Signs the checksums with an SSH key, into SHA256SUMS.sig."""
    # ssh-keygen asks before it replaces a signature.
    pathlib.Path(f"{sums}.sig").unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-Y", "sign", "-f", key, "-n", NAMESPACE, sums], check=True, stdout=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--sign", type=pathlib.Path, metavar="KEY", help="the private or public file of an SSH key")
    options = parser.parse_args()
    os.umask(0o022)
    out = options.folder.resolve()
    build(out)
    if options.sign:
        sign(out / "SHA256SUMS", options.sign)


if __name__ == "__main__":
    main()
