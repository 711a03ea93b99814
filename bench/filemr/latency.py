#!/usr/bin/env python3
"""Measures writes and log appends that are persistent when they return: figures 9 and 10 of "FileMR: Rethinking RDMA Networking for Scalable
Persistent Memory".

Figure 9: 1 KiB at a random offset of a file, then a commit: one-sidedly, by messages, over a mount, over SSHFS, and locally. Figure 10: records of
a remote log beside Debian's libpmemlog on a local file. All files are in the same directory. The turns of all alternate. Writes latency.json,
latency.md, write.svg and append.svg to results/bench-filemr/ or to --out. Needs root, and a network namespace of its own for sshd's port. Exit status 0
if appending 64 B within the host takes at most 1.53 times libpmemlog's time.
"""

import contextlib
import pathlib
import statistics
import sys
import tempfile
from xml.sax.saxutils import escape

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "mount"), str(HERE.parent / "peers"), str(HERE.parents[1] / "scripts")]

import bench  # noqa: E402
import chart  # noqa: E402
import mount  # noqa: E402
import report  # noqa: E402
from harness import procs  # noqa: E402

place = mount.place
LOCAL = procs.ROOT / "build/bench/filemr/local"
TURNS = bench.TARGET_DIR / "release/examples/turns"
SIZES = (64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10)
RATIO_MAX, RATIO_TARGET, RATIO_BYTES = 1.53, 1.25, 64
LOCAL_LOG, REMOTE_LOG = "libpmemlog, local", "RemoteLog, within the host"


def main():
    options = parse_options()
    procs.exit_on_signals()
    bench.warn_if_busy()
    out = report.directory(options)
    tempfile.tempdir = str(options.directory)
    with contextlib.ExitStack() as stack:
        writers, loggers = start(stack)
        writes = in_turns({name: (program, (word, options.count)) for name, (program, word) in writers.items()}, options.turns)
        appends = {size: in_turns({name: (program, (word, size, options.count)) for name, (program, word) in loggers.items()}, options.turns)
                   for size in SIZES}
    page, is_met = tables(writes, appends)
    report.write(options, out, ("latency.json", "latency.md"), report.document("latency.py", writes=writes, appends=appends), page)
    (out / "write.svg").write_text(bars("1 KiB at a random offset, persistent", writes))
    series = {name: [(size, found[name]["us"]) for size, found in appends.items()] for name in loggers}
    (out / "append.svg").write_text(chart.render("A record of a log, persistent", series, "microseconds, median"))
    return 0 if is_met else 1


def parse_options():
    parser = report.parser(__doc__)
    parser.add_argument("--turns", type=int, default=5, help="turns of each (default 5)")
    parser.add_argument("--count", type=int, default=100, help="operations of a turn (default 100)")
    return parser.parse_args()


def start(stack):
    """Starts everything. Two dictionaries of what is measured: name to (program, command)."""
    base = stack.enter_context(place.temporary())
    address = next(place.ADDRESSES)
    export = place.Export(base, address)
    export.start()
    stack.callback(export.stop)
    server = f"{address}:{place.PORT}"
    within, udp = report.Program(stack, TURNS, server, "local"), report.Program(stack, TURNS, server, "udp")
    local = report.Program(stack, LOCAL, base)
    mounted = report.Program(stack, LOCAL, stack.enter_context(mount.terrace()))
    by_ssh = report.Program(stack, LOCAL, stack.enter_context(mount.sshfs()))
    writers = {
        "mapping and msync, local": (local, "msync"), "pwrite and fdatasync, local": (local, "pwrite"),
        "FileMR, within the host": (within, "write"), "FileMR, UDP": (udp, "write"),
        "messages, within the host": (within, "message"), "messages, UDP": (udp, "message"),
        "terrace mount, within the host": (mounted, "pwrite"), "SSHFS": (by_ssh, "pwrite"),
    }
    return writers, {LOCAL_LOG: (local, "pmemlog"), REMOTE_LOG: (within, "append"), "RemoteLog, UDP": (udp, "append")}


def in_turns(systems, turns):
    """{name: {field: median}} of systems of which each is a program and a command."""
    found = {name: [] for name in systems}
    for turn in range(turns + 1):
        for name, (program, words) in systems.items():
            measured = program.run(*words)
            if turn > 0:  # the first one warms up
                found[name].append(measured)
    bench.progress(f"{' '.join(map(str, next(iter(systems.values()))[1]))}: done")
    return {name: {field: statistics.median(row[field] for row in rows) for field in rows[0]} for name, rows in found.items()}


def tables(writes, appends):
    """The tables with the bar, and whether it is met."""
    lines = ["| 1 KiB by offset | write, us | commit, us | both, us | 99 %, us |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {row['write_us']:.1f} | {row['commit_us']:.1f} | {row['us']:.1f} | {row['p99_us']:.0f} |" for name, row in writes.items()]
    names = list(next(iter(appends.values())))
    lines += ["", "| record | " + " | ".join(f"{name}, us" for name in names) + " | within the host/libpmemlog |", "|---" * (len(names) + 2) + "|"]
    for size, found in appends.items():
        cells = " | ".join(f"{found[name]['us']:.1f}" for name in names)
        lines.append(f"| {size} B | {cells} | {ratio_of(found):.2f} |")
    ratio = ratio_of(appends[RATIO_BYTES])
    is_met = ratio <= RATIO_MAX
    lines += ["", f"A record of {RATIO_BYTES} B within the host takes {ratio:.2f} of libpmemlog's time: limit {RATIO_MAX} ({'met' if is_met else 'missed'}), "
              f"target {RATIO_TARGET} ({'met' if ratio <= RATIO_TARGET else 'missed'})."]
    return "\n".join(lines), is_met


def ratio_of(found):
    return found[REMOTE_LOG]["us"] / found[LOCAL_LOG]["us"]


def bars(title, rows):
    """Horizontal bars of the two steps of each row, as SVG."""
    row_height, left, width = 30, 260, 560
    scale = width / max(row["write_us"] + row["commit_us"] for row in rows.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 100}" height="{row_height * len(rows) + 90}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="16" y="24" font-size="15">{escape(title)}</text>',
        '<text x="16" y="42" fill="#555">microseconds, medians: write (green), commit (blue)</text>',
    ]
    for index, (name, row) in enumerate(rows.items()):
        y, write, commit = 56 + row_height * index, row["write_us"] * scale, row["commit_us"] * scale
        parts += [
            f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left}" y="{y}" width="{write:.1f}" height="{row_height - 10}" fill="#1b6e3c"/>',
            f'<rect x="{left + write:.1f}" y="{y}" width="{commit:.1f}" height="{row_height - 10}" fill="#5b9bd5"/>',
            f'<text x="{left + write + commit + 6:.1f}" y="{y + 15}">{row["us"]:.0f}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    sys.exit(main())
