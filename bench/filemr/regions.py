#!/usr/bin/env python3
"""Measures memory regions that are files beside ordinary ones: figure 6 of "FileMR: Rethinking RDMA Networking for Scalable Persistent
Memory" (registration), the memory of 100,000 files, and the rates of READs by both transports.

`pinned` is mlock of as many bytes, 4 KiB a page: what a driver that pins does at least. Writes regions.json, regions.md and
registration.svg to results/bench-filemr/ or to --out. Exit status 0 if every bar is met.
"""

import json
import pathlib
import statistics
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "peers"), str(HERE.parents[1] / "scripts")]

import bench  # noqa: E402
import chart  # noqa: E402
import report  # noqa: E402
from harness import procs  # noqa: E402

REGIONS = procs.ROOT / "build/bench/filemr/regions"
FILES, TRANSPORTS, TIMEOUT_S = 100_000, ("udp", "local"), 300
REGISTRATION_US_MAX, OWN_BYTES_MAX, RATIO_MIN = 10, 64 << 20, 0.97
GIB = 1 << 30
NAMES = {"udp": "UDP", "local": "within the host"}


def main():
    options = report.parser(__doc__).parse_args()
    procs.exit_on_signals()
    bench.warn_if_busy()
    out = report.directory(options)
    document = report.document(
        "regions.py", sizes=run(options, "udp", "sizes"), many=run(options, "udp", "many", FILES)[0],
        rates={transport: run(options, transport, "rates") for transport in TRANSPORTS})
    page, is_met = tables(document)
    report.write(options, out, ("regions.json", "regions.md"), document, page)
    series = {}
    for row in document["sizes"]:
        series.setdefault(row["kind"], []).append((row["bytes"], row["median_us"]))
    (out / "registration.svg").write_text(chart.render("Registration of a memory region", series, "microseconds, median"))
    return 0 if is_met else 1


def run(options, transport, *words):
    """The lines that `regions` prints."""
    bench.progress(f"{words[0]}, {NAMES[transport]} ...")
    return rows_of(options.directory, transport, *words, options.directory)


def rows_of(scratch, transport, *words):
    argv = procs.under_terrace([str(REGIONS), *map(str, words)], "--path", transport)
    with tempfile.TemporaryDirectory(prefix="terrace-regions-", dir=scratch) as directory:
        outcome = procs.run_one(argv, directory, "regions", TIMEOUT_S)
    if outcome.status != 0:
        sys.exit(f"bench: {' '.join(outcome.argv)}: {outcome.verdict}: {outcome.err.strip()}")
    return [json.loads(line) for line in outcome.out.splitlines()]


def tables(document):
    """The tables with their bars, and whether all bars are met."""
    by_size = {}
    for row in document["sizes"]:
        by_size.setdefault(row["bytes"], {})[row["kind"]] = row["median_us"]
    lines = ["| region | file, us | memory, us | pinned, us |", "|---|---|---|---|"]
    for size, found in by_size.items():
        lines.append(f"| {size_name(size)} | {found['file']:.1f} | {found['memory']:.1f} | {found['pinned']:.0f} |" if "pinned" in found else
                     f"| {size_name(size)} | {found['file']:.1f} | {found['memory']:.1f} | |")
    lines += ["", "| READs of | depth | transport | memory, /s | file, /s | file/memory |", "|---|---|---|---|---|---|"]
    ratios = {}
    for transport, rows in document["rates"].items():
        for row in rows:
            ratios.setdefault(transport, []).append(row["ratio"])
            lines.append(f"| {size_name(row['bytes'])} | {row['depth']} | {NAMES[transport]} | {row['memory_per_s']:,} | {row['file_per_s']:,} "
                         f"| {row['ratio']:.2f} |")
    many, largest = document["many"], by_size[64 * GIB]["file"]
    bars = [
        ("registration of 64 GiB", f"{largest:.1f} us", f"at most {REGISTRATION_US_MAX} us", largest <= REGISTRATION_US_MAX),
        (f"own memory of {many['files']:,} files of 4 KiB", f"{many['own_bytes'] / (1 << 20):.1f} MiB", f"at most {OWN_BYTES_MAX >> 20} MiB",
         many["own_bytes"] <= OWN_BYTES_MAX),
    ]
    for transport, found in ratios.items():
        mean = statistics.geometric_mean(found)
        bars.append((f"READs of a file, {NAMES[transport]}, geometric mean", f"{mean:.2f} of memory's", f"at least {RATIO_MIN}", mean >= RATIO_MIN))
    lines += ["", "| bar | found | limit | met |", "|---|---|---|---|"]
    lines += [f"| {name} | {found} | {limit} | {'yes' if is_met else 'no'} |" for name, found, limit, is_met in bars]
    lines += ["", f"Registering each of {many['files']:,} files took {many['us']:.1f} us."]
    return "\n".join(lines), all(is_met for *_, is_met in bars)


def size_name(size):
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


if __name__ == "__main__":
    sys.exit(main())
