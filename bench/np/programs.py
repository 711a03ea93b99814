#!/usr/bin/env python3
"""Runs Open MPI over UCX with buffers of four times the memory budget: a sort over two ranks, whose all-to-all exchange is checked key by key
(bench/np/programs/mpi_sort.c). Three modes as in np.py: pin, terrace, np. The memory of each rank's regions is sampled.

Writes programs.json to results/np-programs/ or to --out. Exit status 0 if the keys are right in each mode, and no sample is above the budget
by more than the pages that are on their way.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "scripts")]

import bench  # noqa: E402
from harness import procs  # noqa: E402

SORT = procs.ROOT / "build/bench/np/mpi_sort"
RANKS, BUFFER_MIB, ROUNDS = 2, 32, 3
BUDGET_BYTES = 2 * BUFFER_MIB * (1 << 20) // 4
ON_THEIR_WAY_BYTES = 4 << 20
TIMEOUT_S = 120
MPIRUN = ("mpirun", "--oversubscribe", "-np", RANKS, "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo", "--mca", "pml", "ucx",
          "--mca", "osc", "ucx", "-x", "UCX_NET_DEVICES=terrace0:1", "-x", "UCX_TLS=rc_v,self")
ENV = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "UCX_WARN_UNUSED_ENV_VARS": "n"}
MODES = {"pin": (), "terrace": ("--dram", BUDGET_BYTES), "np": ("--dram", BUDGET_BYTES, "--nic", "commodity")}
COUNTERS = ("hits", "misses", "pages_read", "evictions")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("/var/tmp"), help="a directory on the disk (default /var/tmp)")
    parser.add_argument("--out", type=pathlib.Path, help="directory of the results (default results/np-programs/TIME)")
    options = parser.parse_args()
    procs.exit_on_signals()
    out = options.out or procs.new_run_dir("np-programs")
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, mode in MODES.items():
        bench.progress(f"mpi_sort, {name} ...")
        with tempfile.TemporaryDirectory(prefix="terrace-np-", dir=options.directory) as directory:
            rows.append({"case": name, **run(mode, directory)})
    document = {
        "command": " ".join(["bench/np/programs.py", *sys.argv[1:]]), "machine": bench.machine(), "budget_bytes": BUDGET_BYTES,
        "buffers_bytes": 2 * BUFFER_MIB << 20, "ranks": RANKS, "rounds": ROUNDS, "rows": rows,
    }
    (out / "programs.json").write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))
    return 0 if all(row["is_right"] for row in rows) else 1


def run(mode, directory):
    swap = ("--swap", directory) if mode else ()
    argv = procs.under_terrace([*map(str, MPIRUN), str(SORT), str(BUFFER_MIB), str(ROUNDS)], *map(str, mode), *swap)
    program = procs.Program(argv, directory, "mpirun", ENV)
    samples = {}
    while program.wait(0.1) is None and time.monotonic() - program.started < TIMEOUT_S:
        for pid in ranks():
            sample(pid, samples)
    is_late = program.process.returncode is None
    if is_late:
        program.stop(is_late=True)
    outcome = program.outcome(is_late)
    resident_max = max((rank["resident_max"] for rank in samples.values()), default=0)
    is_right = outcome.status == 0 and "all sorted" in outcome.out and resident_max <= BUDGET_BYTES + ON_THEIR_WAY_BYTES
    totals = {name: sum(rank.get(name, 0) for rank in samples.values()) for name in COUNTERS}
    return {"is_right": is_right, "line": outcome.out.strip() or outcome.text.strip()[-500:], "seconds": round(outcome.seconds, 1),
            "resident_max": resident_max, **totals, "np": [rank["np"] for rank in samples.values() if rank.get("np")]}


def ranks():
    """The processes of the ranks."""
    for path in pathlib.Path("/proc").glob("[0-9]*/exe"):
        try:
            if os.readlink(path) == str(SORT):
                yield int(path.parent.name)
        except OSError:
            pass


def sample(pid, samples):
    """Notes what `terrace stat` shows of a rank. The last sample has its counters."""
    shown = subprocess.run([procs.terrace_binary(), "stat", str(pid), "--json"], capture_output=True, text=True, timeout=10)
    if shown.returncode != 0:
        return
    devices = json.loads(shown.stdout)["devices"]
    regions = [region for device in devices for region in (device.get("memory") or {}).get("regions", ())]
    if regions:
        rank = samples.setdefault(pid, {"resident_max": 0})
        rank["resident_max"] = max(rank["resident_max"], sum(region["resident_bytes"] for region in regions))
        rank.update({name: max(rank.get(name, 0), sum(region[name] for region in regions)) for name in COUNTERS})
        rank["np"] = next((device["np"] for device in devices if device.get("np")), rank.get("np"))


if __name__ == "__main__":
    sys.exit(main())
