#!/usr/bin/env python3
"""Compares `terrace mount` with SSHFS and the local file system, all on this machine: fio's sequential and random IO, and files.

    mount.py [--seconds N] [--rounds N] [--out DIRECTORY] [CASE...]

Rounds of all file systems alternate. fio drops the client's cached pages of a file before each case; the server's file is in
memory. Prints a table of medians, and whether `terrace mount` is at least twice as fast as SSHFS in every case.
"""

import argparse
import contextlib
import csv
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/mount"))
import place  # noqa: E402

SIZE = 128 << 20
FILES = 300
THRESHOLD = 2.0
# name: (fio's options, read or write)
FIO = {
    "sequential read, 1 MiB": (["--rw=read", "--bs=1m"], "read"),
    "sequential read, 16 KiB": (["--rw=read", "--bs=16k"], "read"),
    "sequential write, 1 MiB": (["--rw=write", "--bs=1m", "--end_fsync=1"], "write"),
    "sequential write, 16 KiB": (["--rw=write", "--bs=16k", "--end_fsync=1"], "write"),
    "random read, 4 KiB": (["--rw=randread", "--bs=4k"], "read"),
    "random read, 4 KiB, 8 jobs": (["--rw=randread", "--bs=4k", "--numjobs=8"], "read"),
    "random write, 4 KiB": (["--rw=randwrite", "--bs=4k", "--end_fsync=1"], "write"),
    "random write, 4 KiB, direct": (["--rw=randwrite", "--bs=4k", "--direct=1"], "write"),
}


def spread(directory):
    """Has ext4 put the directories in it into block groups by their names. A group is searched for a free inode past all that
    were removed in the last minutes, which "small files" would measure: 300 more with each round and file system."""
    subprocess.run(["chattr", "+T", directory], stderr=subprocess.DEVNULL, check=False)


@contextlib.contextmanager
def sshfs(options=()):
    """A directory over SSHFS, with a server and keys of its own."""
    with place.temporary() as base:
        directory, path = base / "exported", base / "mounted"
        for made in (directory, path, pathlib.Path("/run/sshd")):
            made.mkdir(exist_ok=True)
        spread(directory)
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", base / key], check=True)
        config = base / "sshd_config"
        config.write_text(f"Port 2222\nListenAddress 127.0.0.1\nHostKey {base}/host\nAuthorizedKeysFile {base}/user.pub\n"
                          "StrictModes no\nUsePAM no\nPermitRootLogin yes\nSubsystem sftp /usr/lib/openssh/sftp-server\n"
                          f"PidFile {base}/pid\n")
        server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-f", config])
        ssh = [f"-oIdentityFile={base}/user", "-oStrictHostKeyChecking=no", f"-oUserKnownHostsFile={base}/known", "-oport=2222"]
        mount = place.Mount(["sshfs", "-f", *ssh, *options, f"127.0.0.1:{directory}", path], path, stderr=subprocess.DEVNULL)
        try:
            time.sleep(0.5)
            mount.start()
            yield path
        finally:
            subprocess.run(["umount", "--lazy", path], check=False)
            mount.stop()
            server.terminate()
            server.wait()


@contextlib.contextmanager
def terrace(*options):
    with place.mounted(options=options) as at:
        spread(at.directory)
        yield at.path


@contextlib.contextmanager
def local():
    with place.temporary() as base:
        spread(base)
        yield base


SYSTEMS = {
    "terrace": terrace,
    "terrace, UDP": lambda: terrace("--path", "udp"),
    "SSHFS": sshfs,
    "local": local,
}


def run_fio(path, name, seconds):
    """MiB/s."""
    options, kind = FIO[name]
    done = subprocess.run(["fio", "--name=case", f"--filename={path}/data", f"--size={SIZE}", "--ioengine=psync", "--time_based",
                           f"--runtime={seconds}", "--group_reporting", "--output-format=json", *options],
                          stdout=subprocess.PIPE, check=True, timeout=120)
    (job,) = json.loads(done.stdout)["jobs"]
    return job[kind]["bw_bytes"] / (1 << 20)


def run_files(path, _name, _seconds):
    """Files per second that are made, written, listed, read and removed."""
    base, begin = path / uuid.uuid4().hex, time.monotonic()
    base.mkdir()
    for number in range(FILES):
        (base / str(number)).write_bytes(b"x" * 2000)
    for file in sorted(base.iterdir()):
        file.stat()
        file.read_bytes()
    shutil.rmtree(base)
    return FILES / (time.monotonic() - begin)


def cases():
    """name: (function, unit)"""
    return {**{name: (run_fio, "MiB/s") for name in FIO}, "small files": (run_files, "files/s")}


def measure(names, rounds, seconds):
    """{case: {system: median}}"""
    results = {name: {system: [] for system in SYSTEMS} for name in names}
    with contextlib.ExitStack() as stack:
        paths = {name: stack.enter_context(system()) for name, system in SYSTEMS.items()}
        for path in paths.values():
            with open(path / "data", "wb") as file:
                for _ in range(SIZE >> 20):
                    file.write(b"terrace!" * (1 << 17))
        for _ in range(rounds):
            for name in names:
                for system, path in paths.items():
                    results[name][system].append(cases()[name][0](path, name, seconds))
    return {name: {system: statistics.median(values) for system, values in of.items()} for name, of in results.items()}


def show(results):
    """Prints the table. Returns whether every case meets the threshold."""
    print(f"{'':28} {'unit':8}" + "".join(f"{system:>14}" for system in SYSTEMS) + f"{'of SSHFS':>10}")
    for name, of in results.items():
        ratio = of["terrace"] / of["SSHFS"]
        print(f"{name:28} {cases()[name][1]:8}" + "".join(f"{of[system]:14.1f}" for system in SYSTEMS) + f"{ratio:10.1f}")
    meets = all(of["terrace"] >= THRESHOLD * of["SSHFS"] for of in results.values())
    print(f"meets_threshold (at least {THRESHOLD} times SSHFS): {meets}")
    return meets


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_args()
    names = options.cases or list(cases())
    results = measure(names, options.rounds, options.seconds)
    meets = show(results)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        with open(options.out / "mount.csv", "w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["case", "unit", *SYSTEMS])
            table.writerows([name, cases()[name][1], *(f"{of[system]:.1f}" for system in SYSTEMS)] for name, of in results.items())
    return 0 if meets else 1


if __name__ == "__main__":
    sys.exit(main())
