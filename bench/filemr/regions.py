#!/usr/bin/env python3
"""Measures memory regions that are files beside ordinary ones: figure 6 of "FileMR: Rethinking RDMA Networking for Scalable Persistent
Memory" (registration), the memory of 100,000 files, and rates by both transports: of READs, by the verbs and by the API of an export, and of
APPENDs beside WRITEs.

`pinned` is mlock of as many bytes, 4 KiB a page: what a driver that pins does at least. Writes regions.json, regions.md and
registration.svg to results/bench-filemr/ or to --out. Exit status 0 if every bar is met; the rate of APPENDs has a target, which is none.
"""

import contextlib
import json
import pathlib
import statistics
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "mount"), str(HERE.parent / "peers"), str(HERE.parents[1] / "scripts")]

import bench  # noqa: E402
import chart  # noqa: E402
import mount  # noqa: E402
import report  # noqa: E402
from harness import procs  # noqa: E402

place = mount.place
REGIONS = procs.ROOT / "build/bench/filemr/regions"
FILES, TRANSPORTS, TIMEOUT_S = 100_000, ("udp", "local"), 300
TURNS = bench.TARGET_DIR / "release/examples/turns"
REGISTRATION_US_MAX, OWN_BYTES_MAX = 10, 64 << 20
# Turns of each of two, of which the ratio is taken.
RATE_TURNS, DEPTHS = 10, (1, 16)
READ_BYTES, API_BYTES, RECORD_BYTES = (8, 1 << 10, 4 << 10, 64 << 10), (4 << 10,), (64, 1 << 10, 16 << 10, 64 << 10, 1 << 20)
# Of a file's rate to that of memory, by the verbs and by the API; of the rate of APPENDs to that of WRITEs, a target.
RATIO_MIN, API_RATIO_MIN, RECORD_RATIO_TARGET = 0.97, 0.9, 0.7
GIB = 1 << 30
TARGET = "target"
NAMES = {"udp": "UDP", "local": "within the host"}


def main():
    options = report.parser(__doc__).parse_args()
    procs.exit_on_signals()
    bench.warn_if_busy()
    out = report.directory(options)
    document = report.document(
        "regions.py", sizes=run(options, "udp", "sizes"), many=run(options, "udp", "many", FILES)[0],
        rates={transport: rates(options, transport) for transport in TRANSPORTS})
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


def rates(options, transport):
    """Rates of two that take turns, and the medians of their ratios, for sizes and depths."""
    bench.progress(f"rates, {NAMES[transport]} ...")
    with contextlib.ExitStack() as stack:
        tempfile.tempdir = str(options.directory)
        base, address = stack.enter_context(place.temporary()), next(place.ADDRESSES)
        export = place.Export(base, address)
        export.start()
        stack.callback(export.stop)
        regions = report.Program(stack, *procs.under_terrace([str(REGIONS), "rates", str(base)], "--path", transport))
        turns = report.Program(stack, TURNS, f"{address}:{place.PORT}", transport)
        return {
            "READ": compare((regions, "memory"), (regions, "file"), READ_BYTES),
            "READ by the API": compare((regions, "memory"), (turns, "read"), API_BYTES),
            "APPEND": compare((turns, "store"), (turns, "record"), RECORD_BYTES),
        }


def compare(one, other, sizes):
    """The rates of two programs' words, and the ratio of the other to the one: medians of turns that alternate."""
    rows = []
    for size in sizes:
        for depth in DEPTHS:
            found = ([], [])
            for turn in range(RATE_TURNS + 1):
                for which in (0, 1) if turn % 2 else (1, 0):
                    program, word = (one, other)[which]
                    rate = program.run(word, size, depth)["per_s"]
                    if turn > 0:  # the first one warms up
                        found[which].append(rate)
            ratio = statistics.median(second / first for first, second in zip(*found, strict=True))
            rows.append({"bytes": size, "depth": depth, "one_per_s": statistics.median(found[0]), "other_per_s": statistics.median(found[1]), "ratio": ratio})
    return rows


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
    for what, (one, other) in {"READ": ("READs of memory", "READs of a file"), "READ by the API": ("READs of memory", "READs of a file by the API"),
                               "APPEND": ("WRITEs by the API", "APPENDs by the API")}.items():
        lines += ["", f"| bytes | depth | transport | {one}, /s | {other}, /s | ratio |", "|---|---|---|---|---|---|"]
        lines += [f"| {size_name(row['bytes'])} | {row['depth']} | {NAMES[transport]} | {row['one_per_s']:,.0f} | {row['other_per_s']:,.0f} | {row['ratio']:.2f} |"
                  for transport, found in document["rates"].items() for row in found[what]]
    many, largest = document["many"], by_size[64 * GIB]["file"]
    bars = [
        ("registration of 64 GiB", f"{largest:.1f} us", f"at most {REGISTRATION_US_MAX} us", largest <= REGISTRATION_US_MAX),
        (f"own memory of {many['files']:,} files of 4 KiB", f"{many['own_bytes'] / (1 << 20):.1f} MiB", f"at most {OWN_BYTES_MAX >> 20} MiB",
         many["own_bytes"] <= OWN_BYTES_MAX),
    ]
    for what, name, least, word in (("READ", "READs of a file", RATIO_MIN, "at least"), ("READ by the API", "READs of a file by the API", API_RATIO_MIN, "at least"),
                                    ("APPEND", "APPENDs", RECORD_RATIO_TARGET, TARGET)):
        for transport, found in document["rates"].items():
            mean = statistics.geometric_mean(row["ratio"] for row in found[what])
            of = "WRITEs'" if what == "APPEND" else "memory's"
            bars.append((f"{name}, {NAMES[transport]}, geometric mean", f"{mean:.2f} of {of}", f"{word} {least}", mean >= least))
    lines += ["", "| bar | found | limit | met |", "|---|---|---|---|"]
    lines += [f"| {name} | {found} | {limit} | {'yes' if is_met else 'no'} |" for name, found, limit, is_met in bars]
    lines += ["", f"Registering each of {many['files']:,} files took {many['us']:.1f} us."]
    return "\n".join(lines), all(is_met for *_, limit, is_met in bars if not limit.startswith(TARGET))


def size_name(size):
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


if __name__ == "__main__":
    sys.exit(main())
