#!/usr/bin/env python3
"""Measures how well translation caches work with entries for pages and with entries for ranges of files: figure 8 of "FileMR: Rethinking
RDMA Networking for Scalable Persistent Memory". Beside it the time to register all of a workload's files, as regions and pinned (figure 7).

Records the IO of four workloads with strace, and replays it as READs and WRITEs of regions over their files through two models of an
RNIC's translation cache. Both are models; the traces and the layouts of the files are this machine's. Writes results.json and tables.md to
results/bench-filemr/ or to --out. Exit status 0 if ranges load at least 3.8 times fewer entries in each workload, as in the paper.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "scripts")]

import bench  # noqa: E402
import trace  # noqa: E402
import regions  # noqa: E402
import report  # noqa: E402
import translation  # noqa: E402
import workloads  # noqa: E402
from harness import procs  # noqa: E402

WORKLOADS = ("fileserver", "varmail", "redis", "sqlite")
# Section 6.3: "significantly more efficient (3.8x - 340x)".
RATIO_MIN, RATIO_MAX = 3.8, 340
TIMEOUT_S = 600


def main():
    options = parse_options()
    procs.exit_on_signals()
    for tool in ("strace", "redis-server", "redis-cli", "redis-benchmark"):
        if not shutil.which(tool):
            sys.exit(f"bench-filemr: {tool} is missing (Debian: apt-get install strace redis-server redis-tools)")
    out = report.directory(options)
    rows = [measure(name, options) for name in options.only or WORKLOADS]
    report.write(options, out, ("results.json", "tables.md"), report.document("filemr.py", rows=rows), table(rows))
    return 0 if all(row["ratio"] >= RATIO_MIN for row in rows) else 1


def parse_options():
    parser = report.parser(__doc__)
    parser.add_argument("--only", action="append", choices=WORKLOADS, help="only this workload; may be repeated")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the workloads, relative to the default of 0.05 to 1.5 GB")
    return parser.parse_args()


def measure(name, options):
    """Records a workload and replays its trace."""
    bench.progress(f"{name}: recording ...")
    with tempfile.TemporaryDirectory(prefix="terrace-filemr-", dir=options.directory) as directory:
        files, log = pathlib.Path(directory) / "files", pathlib.Path(directory) / "strace"
        files.mkdir()
        run(name, files, log, options.scale)
        bench.progress(f"{name}: replaying ...")
        with log.open(errors="replace") as lines:
            accesses, paths = trace.read(lines, files)
        there = {number: path for number, path in paths.items() if pathlib.Path(path).is_file()}
        layout = {number: translation.extents_of(path) for number, path in there.items()}
        found = translation.replay(accesses, layout)
        pages, ranges = translation.entries_of(there.values())
        bench.progress(f"{name}: registering ...")
        registered = {row["kind"]: row["us"] for row in regions.rows_of(options.directory, "udp", "every", files)}
        return {
            "workload": name, "files": len(there), "gone": len(paths) - len(there),
            "bytes": sum(pathlib.Path(path).stat().st_size for path in there.values()), "page_entries": pages, "range_entries": ranges,
            "accesses": found.accesses, "page_lookups": found.page_lookups, "page_misses": found.page_misses,
            "range_lookups": found.range_lookups, "range_misses": found.range_misses, "ratio": found.ratio,
            "file_us": registered["file"], "pinned_us": registered["pinned"],
        }


def run(name, files, log, scale):
    if name == "redis":
        return workloads.redis(files, scale, lambda command: trace.record(command, log, stdout=subprocess.DEVNULL))
    program = trace.record([sys.executable, str(HERE / "workloads.py"), name, str(files), "--scale", str(scale)], log)
    try:
        status = program.wait(TIMEOUT_S)
    finally:
        program.kill()
    if status != 0:
        sys.exit(f"bench-filemr: the workload {name} ended with status {status}")
    return None


def table(rows):
    lines = [
        "| workload | files | MB | registered as files, ms | pinned, ms | entries by pages | by ranges | accesses | hit ratio by pages | by ranges "
        "| entries loaded, pages/ranges |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratios = [1 - row[f"{kind}_misses"] / max(row[f"{kind}_lookups"], 1) for kind in ("page", "range")]
        lines.append(
            f"| {row['workload']} | {row['files']} | {row['bytes'] / 1e6:.0f} | {row['file_us'] / 1e3:.1f} | {row['pinned_us'] / 1e3:.1f} "
            f"| {row['page_entries']:,} | {row['range_entries']:,} | {row['accesses']:,} "
            f"| {100 * ratios[0]:.1f} % | {100 * ratios[1]:.1f} % | {row['ratio']:.1f} |"
        )
    return "\n".join([*lines, "", f"The paper's ratios are {RATIO_MIN} to {RATIO_MAX} (section 6.3, figure 8). Both caches are models."])


if __name__ == "__main__":
    sys.exit(main())
