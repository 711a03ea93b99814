#!/usr/bin/env python3
"""Runs the suites over `terrace mount`, and ends with a line "N passed, N failed".

    suites.py [--short] [--loopback PROGRAM] [SUITE...]

--short is the part that CI runs. --loopback mounts a local directory by the program of crates/mount/examples/loopback, so
that only the mount is tested.
"""

import argparse
import concurrent.futures
import contextlib
import filecmp
import fnmatch
import hashlib
import os
import pathlib
import re
import sqlite3
import subprocess
import sys
import tempfile
import time

import place
from place import ROOT

TOOLS = ROOT / "build/mount/tools/bin"
HERE = pathlib.Path(__file__).resolve().parent
RESTART_S = 2.0
SEEDS = (1, 2, 3)
USERS = '[["nobody", "nogroup"], ["games", "games"]]'


class Failed(Exception):
    """A suite's failure, in one line or more."""


def run(*command, seconds=600, **options):
    """Runs a command; its output belongs to the failure."""
    command = [str(part) for part in command]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                          timeout=seconds, check=False, **options)
    if done.returncode:
        raise Failed(f"{' '.join(command)}: status {done.returncode}\n{done.stdout[-6000:]}")
    return done.stdout


def restarting(at, options):
    """Restarts of the server, unless there is none."""
    return contextlib.nullcontext([]) if options.loopback else at.restarts(RESTART_S)


def files(options):
    """cp, diff, git: what everyone does."""
    with place.mounted(loopback=options.loopback) as at:
        source = ROOT / ("crates/mount" if options.short else "crates")
        with restarting(at, options) as kills:
            for number in range(1 if options.short else 5):
                copy = at.path / f"copy-{number}"
                run("cp", "-a", source, copy)
                run("diff", "-r", "--no-dereference", source, copy)
                git = ["git", "-C", copy, "-c", "user.name=a", "-c", "user.email=a@b"]
                run(*git, "init", "-q")
                run(*git, "add", ".")
                run(*git, "commit", "-q", "-m", "all")
                run(*git, "fsck", "--strict")
                if run(*git, "status", "--porcelain"):
                    raise Failed("git status finds changes")
        compare(source, at.directory / "copy-0")
        run("rm", "-r", at.path / "copy-0")
        return f"{len(kills)} restarts"


def compare(source, copy):
    """The server has the bytes, too."""
    for path in source.rglob("*"):
        if path.is_file() and not path.is_symlink() and not filecmp.cmp(path, copy / path.relative_to(source), shallow=False):
            raise Failed(f"{path} differs on the server")


def read_exclusions(name):
    """The names, or patterns, in a list of exclusions."""
    lines = (HERE / name).read_text().splitlines()
    return [line.split("|")[0].strip() for line in lines if line and not line.startswith("#")]


def pjdfstest(options):
    """POSIX semantics, by the crate pjdfstest. Exactly the excluded cases fail."""
    with place.mounted(others=True, loopback=options.loopback) as at, tempfile.NamedTemporaryFile("w") as config:
        config.write(f"[features]\nutime_now = {{}}\nutimensat = {{}}\n[settings]\nnaptime = 0.02\n"
                     f"allow_remount = false\n[dummy_auth]\nentries = {USERS}\n")
        config.flush()
        at.path.chmod(0o755)
        done = subprocess.run([TOOLS / "pjdfstest", "-c", config.name, "-p", at.path], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", timeout=600, check=False)
    return judge_pjdfstest(done.stdout, read_exclusions("exclusions.txt"))


def judge_pjdfstest(output, excluded):
    """The summary, if the failed cases are those that match the patterns, and each pattern matches one."""
    failed = re.findall(r"^(\S+) +FAILED$", output, re.MULTILINE)
    unexpected = [name for name in failed if not any(fnmatch.fnmatchcase(name, pattern) for pattern in excluded)]
    unused = [pattern for pattern in excluded if not fnmatch.filter(failed, pattern)]
    summary = re.findall(r"^Summary: (.*)$", output, re.MULTILINE)
    if unexpected or unused or not summary:
        raise Failed(f"unexpected: {unexpected}, exclusions that nothing needs: {unused}\n{output[-2000:]}")
    return f"{summary[0]}; the failed ones are excluded"


FSX = """
flen = 262144
[opsize]
max = 65536
[weights]
close_open = 1.0
invalidate = 1.0
mapread = 10.0
mapwrite = 10.0
read = 10.0
write = 10.0
truncate = 2.0
fsync = 0.2
fdatasync = 0.2
punch_hole = 2.0
sendfile = 5.0
posix_fadvise = 1.0
copy_file_range = 2.0
"""


# fsx never unmaps what it reads from, and the kernel permits a process 65,530 mappings: it runs this many operations at a time.
FSX_RUN = 50_000


def fsx(options):
    """Random operations on a file, by the crate fsx: seeds side by side, with restarts of the server but for the first."""
    operations = 5_000 if options.short else 1_000_000
    seeds = SEEDS[:1] if options.short else SEEDS
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(place.mounted(loopback=options.loopback)) for _ in seeds]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor())
        kills = sum(pool.map(lambda seed, at: run_fsx(seed, at, operations, options), seeds, places))
    return f"{len(seeds)} seeds of {operations} operations, {kills} restarts"


def run_fsx(seed, at, operations, options):
    """The number of restarts."""
    with tempfile.NamedTemporaryFile("w") as config:
        config.write(FSX)
        config.flush()
        with contextlib.nullcontext([]) if seed == SEEDS[0] else restarting(at, options) as kills:
            for begun in range(0, operations, FSX_RUN):
                run(TOOLS / "fsx", "-f", config.name, "-N", min(FSX_RUN, operations), "-S", seed + begun, "-P", tempfile.gettempdir(),
                    at.path / "fsx", seconds=3600)
        return len(kills)


JOBS = {
    "sequential": ["--rw=write", "--bs=64k"],
    "random": ["--rw=randwrite", "--bsrange=512-128k", "--bs_unaligned=0"],
    "mixed": ["--rw=randrw", "--bs=4k", "--fsync=64"],
    "mmap": ["--rw=randwrite", "--bs=4k", "--ioengine=mmap"],
    "direct": ["--rw=randwrite", "--bs=16k", "--direct=1"],
}


def fio(options):
    """fio's verify jobs, with restarts of the server."""
    size = "16m" if options.short else "256m"
    with place.mounted(loopback=options.loopback) as at, restarting(at, options) as kills:
        for name, job in JOBS.items():
            engine = [] if any("ioengine" in part for part in job) else ["--ioengine=psync"]
            run("fio", f"--name={name}", f"--directory={at.path}", f"--size={size}", "--numjobs=2",
                "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--do_verify=1", "--group_reporting", *engine, *job)
        return f"{len(JOBS)} jobs, {len(kills)} restarts"


def sqlite(options):
    """SQLite with a write-ahead log: two processes write, the server restarts, and every commit is there."""
    rows, writers = (60, 2) if options.short else (1_000, 2)
    with place.mounted(loopback=options.loopback) as at, restarting(at, options) as kills:
        base = at.path / "base.sqlite"
        with contextlib.closing(sqlite3.connect(base)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE t (writer INTEGER, row INTEGER, text BLOB)")
        processes = [subprocess.Popen([sys.executable, __file__, "--sqlite-writer", base, str(writer), str(rows)])
                     for writer in range(writers)]
        if any([process.wait() for process in processes]):
            raise Failed("a writer failed")
        with contextlib.closing(sqlite3.connect(base)) as connection:
            (result,), (count,) = (connection.execute(text).fetchone()
                                   for text in ("PRAGMA integrity_check", "SELECT count(*) FROM t"))
        if (result, count) != ("ok", rows * writers):
            raise Failed(f"{result}, {count} rows")
        return f"{count} commits, {len(kills)} restarts"


def write_rows(base, writer, rows):
    """A writer of the suite sqlite."""
    with contextlib.closing(sqlite3.connect(base, timeout=120)) as connection:
        connection.execute("PRAGMA synchronous=FULL")
        for row in range(rows):
            text = hashlib.sha256(f"{writer}-{row}".encode()).digest() * 16
            with connection:
                connection.execute("INSERT INTO t VALUES (?, ?, ?)", (writer, row, text))


def build(options):
    """git clone and cargo build of this project, with restarts of the server. The second build has nothing to do."""
    with place.mounted(loopback=options.loopback) as at, restarting(at, options) as kills:
        run("git", "clone", "-q", "--no-hardlinks", "--depth", "1", f"file://{ROOT}", at.path / "clone", seconds=1200)
        run("git", "-C", at.path / "clone", "fsck")
        for _ in range(2):
            run("cargo", "build", "-q", "--workspace", "--locked", "--offline", cwd=at.path / "clone", seconds=7200)
        return f"{len(kills)} restarts"


def xfstests(options):
    """xfstests' generic tests, from the directory XFSTESTS. No others fail than the excluded ones."""
    directory = os.environ.get("XFSTESTS")
    if not directory or options.loopback:
        raise Failed("XFSTESTS is to name the directory of a built xfstests, which is run over an export")
    done = subprocess.run(["unshare", "--mount", sys.executable, HERE / "xfstests.py", directory, "-g", "generic/quick"],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=7200, check=False)
    return judge_xfstests(done.stdout, read_exclusions("xfstests-exclusions.txt"))


def judge_xfstests(output, excluded):
    """The summary, if no others have failed than the excluded ones: which of these do depends on the machine and on the version."""
    lists = {what: re.findall(rf"^{what}: (.*)$", output, re.MULTILINE) for what in ("Ran", "Not run", "Failures")}
    if not lists["Ran"]:
        raise Failed(output[-4000:])
    ran, skipped, failed = ({name for line in names for name in line.split()} for names in lists.values())
    if failed - set(excluded):
        raise Failed(f"unexpected: {sorted(failed - set(excluded))}; what they say is in {ROOT}/results/xfstests")
    passed = ran - failed - skipped
    needless = sorted(passed & set(excluded))
    return (f"{len(passed)} passed, {len(skipped)} ask for what is not there, {len(failed)} failed and are excluded"
            + (f"; excluded ones that passed: {needless}" if needless else ""))


SUITES = {suite.__name__: suite for suite in (files, pjdfstest, fsx, fio, sqlite, build, xfstests)}
SHORT = ("files", "pjdfstest", "fsx", "fio", "sqlite")


def main():
    if sys.argv[1:2] == ["--sqlite-writer"]:
        return write_rows(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--loopback", type=pathlib.Path)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    options = parser.parse_args()
    passed = failed = 0
    names = options.suites or (SHORT if options.short else SUITES)
    if not options.suites and not options.short and "XFSTESTS" not in os.environ:
        names = [name for name in names if name != "xfstests"]
        print("xfstests: not run, XFSTESTS does not name the directory of a built xfstests", flush=True)
    for name in names:
        begin = time.monotonic()
        try:
            said = SUITES[name](options)
            passed += 1
            print(f"{name}: ok, {said}, {time.monotonic() - begin:.0f} s", flush=True)
        except (Failed, OSError, subprocess.SubprocessError, sqlite3.Error, RuntimeError) as error:
            failed += 1
            print(f"{name}: FAILED, {error}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
