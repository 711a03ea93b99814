#!/usr/bin/env python3
"""Measures what unmodified programs pay for memory that is not pinned, in the manner of NP-RDMA's evaluation (figures 7 to 10, table 2).

The same two programs (bench/np/*.c) run in three modes, which take turns in each round, the ends on a processor each:

    pin   without --dram: ordinary memory, which the NIC never pages
    np    --dram: private memory that is paged to a swap file
    odp   --dram --mode odp: a model of hardware with on-demand paging, over a shared file mapping, because it pages files only

Writes a JSON file for each section and transport, tables.md and plots to results/bench-np/ or to --out, where the tables are of all files
that are there. Exit status 0 if every bar is met.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "peers"), str(HERE.parents[1] / "scripts")]

import bench  # noqa: E402
import tables  # noqa: E402
from harness import procs  # noqa: E402
from sections import ODP, SECTIONS  # noqa: E402

NP = procs.ROOT / "build/bench/np/np"
CLIENT_CPU, SERVER_CPU = "0", "1"
STEADY_S, TIMEOUT_S = 0.4, 60


def main():
    options = parse_options()
    procs.exit_on_signals()
    bench.warn_if_busy()
    out = options.out or procs.new_run_dir("bench-np")
    out.mkdir(parents=True, exist_ok=True)
    for section in SECTIONS:
        for path in section.paths:
            if options.only in section.name and path in (options.path or path):
                rows = [{"round": index, **row} for index in range(options.rounds) for row in measure(section, path, index, options)]
                document = {
                    "command": " ".join(["bench/np/np.py", *sys.argv[1:]]), "machine": bench.machine(), "load_before": os.getloadavg()[0],
                    "section": section.name, "path": path, "rounds": options.rounds,
                    "points": summarise(rows), "rows": rows,
                }
                (out / f"{section.name}-{path}.json").write_text(json.dumps(document, indent=1) + "\n")
    page, documents, bars = tables.write(out)
    print(json.dumps(documents, indent=1) if options.json else f"{page}\nnumbers and plots in {out}")
    return 0 if all(bar.is_met for bar in bars) else 1


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"only sections whose names contain this word: {', '.join(section.name for section in SECTIONS)}")
    parser.add_argument("--path", choices=("udp", "local"), help="only this transport")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each section (default 3)")
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("/var/tmp"), help="a directory on the disk (default /var/tmp)")
    parser.add_argument("--out", type=pathlib.Path, help="directory of the results (default results/bench-np/TIME)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


def measure(section, path, index, options):
    """One round of a section: the modes take turns, and each round begins with another one. The model is in the first one only: its faults
    take most of a round's time."""
    cases = [case for case in section.cases if index == 0 or case.mode != ODP]
    first = index % len(cases)
    for case in cases[first:] + cases[:first]:
        bench.progress(f"round {index + 1} of {options.rounds}, {section.name}, {path}: {case.name} ...")
        with tempfile.TemporaryDirectory(prefix="terrace-np-", dir=options.directory) as directory:
            if section.measures_disk and case.mode != ODP:
                yield from measure_disk(section, directory)
            if section.test:
                yield from run_pair(section, case, path, directory)
            else:
                for size, content in section.regions:
                    argv = ("register", size, content, *case.mode.file_of(directory))
                    shown = run_np(argv, directory, CLIENT_CPU, case.mode.options(section, directory))
                    yield from ({**row, "op": content, "size": size} for row in rows_of(shown, case.name))


def measure_disk(section, directory):
    """The disk as the server finds it: on its processor, while the other one is busy, as the client's is. On the other processor, or while
    that one sleeps, a read takes up to twice as long."""
    busy = procs.Program(["taskset", "-c", CLIENT_CPU, "sh", "-c", "while :; do :; done"], directory, "busy")
    try:
        yield from rows_of(run_np(("disk", f"{directory}/disk", section.region_bytes), directory, SERVER_CPU), "disk")
    finally:
        busy.stop()


def run_np(arguments, directory, cpu, options=None):
    """Runs `np`; under Terrace if there are options for it, even none."""
    argv = [str(NP), *map(str, arguments)]
    argv = argv if options is None else procs.under_terrace(argv, *options)
    return procs.run_one(["taskset", "-c", cpu, *argv], directory, "np", TIMEOUT_S)


def run_pair(section, case, path, directory):
    """A server and a client. Returns the client's rows, the last of which has the server's counters."""
    socket_path = pathlib.Path(directory, "socket")
    options = ("--path", path, *case.mode.options(section, directory))
    region = (section.region_bytes, case.content, *case.mode.file_of(directory))
    argv = procs.under_terrace([str(NP), "server", str(socket_path), *map(str, region)], *options)
    server = procs.Program(["taskset", "-c", SERVER_CPU, *argv], directory, "server")
    try:
        procs.wait_until(lambda: socket_path.exists() or server.wait(0) is not None, "the server's socket")
        wait_until_steady(server.process.pid)
        before = counters(server.process.pid)
        rows = list(rows_of(run_np(("client", socket_path, section.test), directory, CLIENT_CPU, options), case.name))
        after = counters(server.process.pid)
    finally:
        server.stop()
    counted = {name: after[name] - before[name] for name in after}
    return [*rows, {"case": case.name, "op": "counters", "size": 0, **counted, "resident_bytes": after.get("resident_bytes", 0)}]


def rows_of(outcome, name):
    if outcome.status != 0:
        sys.exit(f"bench: {' '.join(outcome.argv)}: {outcome.verdict}: {outcome.err.strip()}")
    for line in outcome.out.splitlines():
        yield {"case": name, "op": name, "size": 0, **json.loads(line)}


def counters(pid):
    """The counters of the server's region, if it is paged."""
    shown = subprocess.run([procs.terrace_binary(), "stat", str(pid), "--json"], capture_output=True, text=True, timeout=10)
    regions = [region for device in json.loads(shown.stdout)["devices"] for region in (device.get("memory") or {}).get("regions", ())]
    names = ("hits", "misses", "pages_read", "evictions", "resident_bytes")
    return {name: sum(region[name] for region in regions) for name in names} if regions else {}


def wait_until_steady(pid):
    """Returns when no page of the region comes or leaves any more: what was filled before the registration is beyond the budget."""
    last, since = None, time.monotonic()
    deadline = since + TIMEOUT_S
    while time.monotonic() - since < STEADY_S and time.monotonic() < deadline:
        time.sleep(0.05)
        found = counters(pid)
        if not found:
            return
        if found != last:
            last, since = found, time.monotonic()


def summarise(rows):
    """One row for each measurement: of times and rates the best round counts, because other load on the machine only slows them down; of
    counters the median."""
    grouped = {}
    for row in rows:
        grouped.setdefault((row["case"], row["op"], row["size"]), []).append(row)
    summary = []
    for (case, op, size), found in grouped.items():
        metrics = [name for name in found[0] if name not in ("round", "case", "op", "size")]
        summary.append({"case": case, "op": op, "size": size, **{name: best_of(name)(row[name] for row in found) for name in metrics}})
    return summary


def best_of(metric):
    if metric.endswith(("_ns", "_us")):
        return min
    return max if metric in ("rate", "bytes_per_s") else statistics.median


if __name__ == "__main__":
    sys.exit(main())
