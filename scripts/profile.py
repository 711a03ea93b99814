#!/usr/bin/env python3
"""PGO build: runs an instrumented build, and leaves its profile in build/profile for every later release build in this
directory.

The compiler then lays out, inlines and orders code by the profile (profile-guided optimization). Three steps: an
instrumented build, the workload below, and a build with the profile. Takes about eight minutes on two cores.

The compiler optimizes code that the workload never runs for size. So the workload must cover all
operations of programs: both paths, one-sided operations and messages, every transport service, waiting and polling, regions
larger than memory.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from harness import procs  # noqa: E402

OUT = procs.ROOT / "build/profile"
WORK = OUT / "work"
RAW = WORK / "raw"
# While this file exists, the paths in BUILT contain an instrumented build, which is not for users (scripts/release.sh
# checks).
INSTRUMENTED_MARK = OUT / "instrumented"
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or procs.ROOT / "target") / "profile"
# Programs that contain Terrace, by their make targets. Instrumented ones must be removed.
NATIVE = "build/bench/peers/native"
BUILT = ("build/bin", "build/lib", NATIVE)
STEP_LIMIT_S = 1800

PERFTEST = [
    ["ib_send_lat"], ["ib_send_lat", "-e"], ["ib_send_lat", "-I", "64"], ["ib_send_lat", "-c", "UC"], ["ib_send_lat", "-c", "UD"],
    ["ib_send_bw", "-a", "-n", "200"], ["ib_send_bw", "-e"], ["ib_send_bw", "--use-srq"], ["ib_send_bw", "-c", "UD"], ["ib_send_bw", "-c", "XRC"],
    ["ib_write_lat"], ["ib_write_bw", "-a", "-n", "200"], ["ib_write_bw", "-c", "UC"], ["ib_write_bw", "-q", "4"],
    ["ib_read_lat"], ["ib_read_bw", "-a", "-n", "200"], ["ib_read_bw", "-e"], ["ib_atomic_lat"], ["ib_atomic_bw"],
]


class Failure(Exception):
    """An error message of one line."""


def main():
    procs.exit_on_signals()
    try:
        profdata = find_profdata()
        shutil.rmtree(WORK, ignore_errors=True)
        RAW.mkdir(parents=True)
        try:
            build_instrumented()
            run_workload()
            install_profile(profdata)
        finally:
            remove_instrumented()
        run("building with the profile", ["make", "--no-print-directory", "build"])
    except Failure as failure:
        print(f"profile: {failure}", file=sys.stderr)
        print("profile: the old profile is unchanged, but 'make build' has to build again", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    return 0


def find_profdata():
    """The llvm-profdata of this compiler's toolchain, which reads its profile format."""
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True).stdout.strip()
    found = sorted(pathlib.Path(sysroot).glob("lib/rustlib/*/bin/llvm-profdata"))
    if not found:
        raise Failure("rustc has no llvm-profdata: run 'rustup component add llvm-tools'")
    return found[0]


def build_instrumented():
    env = {"TERRACE_PROFILE_INTO": str(RAW), "CARGO_TARGET_DIR": str(TARGET),
           # The C compiler links this program, in which nothing references the profile runtime that writes the counts.
           "NATIVE_LIBRARIES": "-Wl,--undefined=__llvm_profile_runtime"}
    remove_instrumented()
    INSTRUMENTED_MARK.touch()
    run("instrumented build", ["make", "--no-print-directory", "build"], env)
    run("instrumented native program", ["scripts/release.sh", "--package", "terrace-nic", "--example", "peer_native"], env)
    run("linking the workload's programs", ["make", "--no-print-directory", "build/bench/peers/verbs", NATIVE], env)
    # Profiles of build scripts and procedural macros, which were instrumented, too.
    for profile in RAW.iterdir():
        profile.unlink()


def remove_instrumented():
    for built in BUILT:
        path = procs.ROOT / built
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.rmtree(TARGET, ignore_errors=True)
    INSTRUMENTED_MARK.unlink(missing_ok=True)


def run_workload():
    peers = ["bench/peers/peers.py", "--only", "terrace", "--rounds", "1", "--milliseconds", "20", "--out", WORK / "peers"]
    run_part("one-sided operations, messages and atomics, on both paths", [sys.executable, *peers])
    for path in ("udp", "local"):
        run_perftest(path)
    plans = [procs.ROOT / f"bench/term/table-{kind}-latency.toml" for kind in ("read", "write")]
    term = [procs.terrace_binary(), "bench", "--short", "--out", WORK / "term"]
    if os.geteuid() != 0:
        print("profile: not root, so the workload omits regions larger than memory, which will not be faster", flush=True)
        return
    run_part("regions larger than memory", [*term, "--mode", "odp,rpc,term", *plans])
    run_part("regions larger than memory, over shared memory", [*term, "--mode", "term", "--path", "local", *plans])


def run_part(what, argv):
    """Runs a part of the workload. If it fails, as on a busy machine, the counts so far are kept."""
    try:
        run(what, argv)
    except Failure as failure:
        print(f"profile: {failure}; its counts so far are used", flush=True)


def run_perftest(path):
    started = time.monotonic()
    for number, (tool, *arguments) in enumerate(PERFTEST):
        port = procs.free_port()
        server = procs.under_terrace([tool, "-F", "-p", str(port), *arguments], "--path", path)
        pair = procs.run_pair(server, [*server, procs.HOST], port, WORK / f"{path}-{number}")
        if pair.server.status != 0 or pair.client.status != 0:
            reason = pair.note or f"server {pair.server.verdict}, client {pair.client.verdict}"
            raise Failure(f"{' '.join([tool, *arguments])} by {path}: {reason}\n{(pair.server.text + pair.client.text).strip()[-600:]}")
    print(f"profile: perftest by {path}, {time.monotonic() - started:.0f} s", flush=True)


def install_profile(profdata):
    raw = sorted(RAW.glob("*.profraw"))
    if not raw:
        raise Failure("the workload has written no counts")
    merged = WORK / "merged"
    run("merging the counts", [profdata, "merge", "-o", merged, *raw])
    version = subprocess.run(["rustc", "--version"], capture_output=True, check=True).stdout
    for older in OUT.glob("*.profdata"):
        older.unlink()
    (OUT / "rustc").write_bytes(version)
    merged.rename(OUT / f"{hashlib.sha256(merged.read_bytes()).hexdigest()[:16]}.profdata")


def run(what, argv, env=None):
    """Runs one step. Prints its output only if it fails."""
    started = time.monotonic()
    # The calling make puts its variables into the environment; those in MAKEFLAGS and MAKEOVERRIDES would override
    # `env`.
    for name in ("MAKEFLAGS", "MAKEOVERRIDES", "TERRACE"):
        os.environ.pop(name, None)
    program = procs.Program(argv, WORK, "step", env)
    status = None
    try:
        status = program.wait(STEP_LIMIT_S)
    finally:
        if status is None:
            program.stop()
    if status != 0:
        outcome = program.outcome(stopped=status is None)
        print(outcome.text[-4000:], file=sys.stderr)
        raise Failure(f"{what}: {outcome.verdict}")
    print(f"profile: {what}, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
