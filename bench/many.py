#!/usr/bin/env python3
"""Measures Terrace's costs as functions of the numbers of queue pairs, memory regions, processes and threads, with verified data.

Each row is one run of `many` (bench/many.c) under `terrace run`: the round with the least processor time per request, because other
load on the machine only adds cost. If perf is installed, another round of some groups is sampled: the share of time in waits for
locks, in user space (slow paths of parking_lot and futex(2)) and in the kernel (slow path of spin locks), and the number of futex
calls. Writes JSON and CSV to results/bench-many/, or to --out. Exit status 0 if all data was correct and the thresholds are met.
"""

import argparse
import csv
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "scripts")]

import bench  # noqa: E402
from harness import procs  # noqa: E402

MANY = procs.ROOT / "build/bench/many"
TIMEOUT_S = 120

# The name of each row, and its options of `many`. The rows of a group are compared with its first row.
GROUPS = {
    "queue pairs": [(f"{count} queue pairs", ("-q", count, "-m", 1000)) for count in (1, 10, 100, 1000)],
    "regions": [(f"{count} regions", ("-q", 10, "-m", count)) for count in (10, 100, 1000, 10_000)],
    "queue pairs, asleep": [(f"{count} queue pairs, events", ("-q", count, "-m", 1000, "-e")) for count in (1, 10, 100, 1000)],
    "processes": [(f"{count} processes", ("-p", count, "-q", 63, "-m", 100, "-d", 1, "-e")) for count in (2, 8, 64)],
    "all at once": [("1000 queue pairs, 10000 regions", ("-q", 1000, "-m", 10_000))],
    "threads": [(f"{count} threads", ("-q", 100, "-m", 1000, "-T", count)) for count in (1, 2, 4)],
}

PROFILED = ("all at once", "threads")
LOCKS = re.compile(r"lock_slow|lock_contended|parking_lot|futex|spin_lock_slowpath|lock_exclusive_slow|lock_shared_slow")

# The limit of a row's processor time per request, relative to the first row of its group.
CPU_RATIO_MAX = 2.0
COLUMNS = ("group", "name", "requests_per_s", "cpu_us_per_request", "cpu_ratio", "create_us", "connect_us", "destroy_us",
           "pair_bytes", "register_us", "deregister_us", "region_bytes", "descriptors_of_objects", "threads_of_library",
           "resident_mib_max", "retransmits", "timeouts", "overflows", "lock_percent", "futex_calls_per_1000",
           "wrong_words")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each row (default 3)")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of work in each round (default 1)")
    parser.add_argument("--only", default="", help="only groups whose name contains this word")
    parser.add_argument("--addr", default="127.0.42.1", help="the address of all processes (default 127.0.42.1)")
    parser.add_argument("--out", type=pathlib.Path, help="directory of the results (default results/bench-many/TIME)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    procs.exit_on_signals()
    bench.warn_if_busy()
    rows = []
    for group, members in GROUPS.items():
        if options.only in group:
            rows += measure_group(group, members, options)
    document = {"command": " ".join(["bench/many.py", *sys.argv[1:]]), "machine": bench.machine(), "rows": rows}
    out = options.out or procs.new_run_dir("bench-many")
    out.mkdir(parents=True, exist_ok=True)
    (out / "many.json").write_text(json.dumps(document, indent=1) + "\n")
    with open(out / "many.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: shortened(value) for name, value in row.items()} for row in rows)
    print(json.dumps(document, indent=1) if options.json else f"{table(rows)}\nnumbers in {out}")
    return 0 if all(row["meets_threshold"] for row in rows) else 1


def measure_group(group, members, options):
    rows = []
    for name, arguments in members:
        bench.progress(f"{name} ...")
        rounds = [run(arguments, options) for _ in range(options.rounds)]
        best = min(rounds, key=lambda row: row["cpu_us_per_request"])
        first = rows[0] if rows else best
        ratio = best["cpu_us_per_request"] / first["cpu_us_per_request"]
        wrong = sum(row["wrong_words"] for row in rounds)
        rows.append({"group": group, "name": name, **best, "cpu_ratio": ratio, "wrong_words": wrong,
                     "requests_per_s_of_rounds": [row["requests_per_s"] for row in rounds],
                     "meets_threshold": ratio <= CPU_RATIO_MAX and wrong == 0})
        if group in PROFILED and shutil.which("perf"):
            rows[-1].update(profile(arguments, options))
    return rows


def profile(arguments, options):
    """The share of samples in waits for locks, the number of futex calls, and the top symbols."""
    with tempfile.TemporaryDirectory() as directory:
        samples, calls = pathlib.Path(directory, "samples"), pathlib.Path(directory, "calls")
        run(arguments, options, ("perf", "record", "--quiet", "--freq", "999", "--output", samples, "--"))
        report = ["perf", "report", "--input", samples, "--stdio", "--no-children", "--fields", "overhead,symbol"]
        shown = subprocess.run(report, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
        counted = run(arguments, options, ("perf", "stat", "--event", "syscalls:sys_enter_futex", "--output", calls, "--"))
        found = re.search(r"([\d,]+)\s+syscalls:sys_enter_futex", calls.read_text())
    shares = [(float(share), symbol.strip()) for share, symbol in re.findall(r"^\s*([\d.]+)%\s+(.*)$", shown, re.MULTILINE)]
    futex_calls = int(found.group(1).replace(",", "")) if found else None
    return {
        "lock_percent": sum(share for share, symbol in shares if LOCKS.search(symbol)),
        "futex_calls_per_1000": None if futex_calls is None else futex_calls * 1000 / (2 * counted["round_trips"]),
        "top_symbols": [f"{share:.1f} % {symbol}" for share, symbol in shares[:15]],
    }


def run(arguments, options, wrapper=()):
    argv = procs.under_terrace([str(MANY), *map(str, arguments), "-t", str(options.seconds)], addr=options.addr)
    argv = [*map(str, wrapper), *argv]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        work = json.loads(process.stdout.readline() or "{}")
        if "pids" in work:
            counts = counters(work.pop("pids"))
        rest, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    if process.returncode != 0 or "round_trips" not in work:
        sys.exit(f"bench: {' '.join(argv)}: exit status {process.returncode}")
    requests = 2 * work["round_trips"]
    return {
        **work, **json.loads(rest), **counts,
        "arguments": " ".join(map(str, arguments)),
        "requests_per_s": requests / work["seconds"],
        "cpu_us_per_request": work["cpu_s"] * 1e6 / requests,
        "resident_mib_max": work["resident_bytes_max"] / (1 << 20),
    }


def counters(pids):
    """Retransmissions, timeouts and overflows of all processes, by `terrace stat`."""
    totals = {"retransmits": 0, "timeouts": 0, "overflows": 0}
    for pid in pids:
        shown = subprocess.run([procs.terrace_binary(), "stat", str(pid), "--json"], capture_output=True, text=True, timeout=30)
        for device in json.loads(shown.stdout)["devices"]:
            totals["overflows"] += device["port"].get("rx_overflows", 0)
            for pair in device["queue_pairs"]:
                totals["retransmits"] += pair["counts"]["retransmits"]
                totals["timeouts"] += pair["counts"]["timeouts"]
    return totals


def shortened(value):
    return round(value, 3) if isinstance(value, float) else value


def table(rows):
    titles = ("", "requests/s", "CPU us each", "ratio", "QP: create us", "connect us", "destroy us", "bytes", "MR: register us",
              "deregister us", "bytes", "descriptors", "retransmits", "timeouts", "overflows")
    names = ("name", "requests_per_s", "cpu_us_per_request", "cpu_ratio", "create_us", "connect_us", "destroy_us", "pair_bytes",
             "register_us", "deregister_us", "region_bytes", "descriptors_of_objects", "retransmits", "timeouts", "overflows")
    formats = ("{}", "{:.0f}", "{:.2f}", "{:.2f}", "{:.1f}", "{:.1f}", "{:.1f}", "{:.0f}", "{:.1f}", "{:.1f}", "{:.0f}", "{}", "{}",
               "{}", "{}")
    lines = [titles] + [tuple(form.format(row[name]) for form, name in zip(formats, names)) for row in rows]
    lines += [(f"  waiting for locks: {row['lock_percent']:.2f} % of the time; {row['futex_calls_per_1000']:.2f} futex calls "
               f"for 1000 requests ({row['name']})", *[""] * (len(titles) - 1))
              for row in rows if "lock_percent" in row]
    widths = [max(len(line[column]) for line in lines if line[1]) for column in range(len(titles))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main())
