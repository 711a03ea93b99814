#!/usr/bin/env python3
"""Compares Terrace with alternatives without an RNIC: memcpy, UCX, libfabric, Redis, memcached and NBD, all on this machine.

Each round runs every peer once, in an order that changes from round to round, so that other load on the machine affects all peers.
A peer is a target and a client (bench/peers/peer_*.c). The client verifies all data before it measures. Writes rows.csv (every
round), points.csv (medians, spread and ratios), tables.md, peers.json and plots to results/bench-peers/ or to --out.
The tables name peers that are missing or fail, which does not affect the others. Exit status 0 if all points of Terrace were measured.
"""

import argparse
import csv
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "scripts")]

import bench  # noqa: E402
import chart  # noqa: E402
import lineup  # noqa: E402
import results  # noqa: E402
from harness import hugepages, procs  # noqa: E402

PROGRAMS = procs.ROOT / "build/bench/peers"
ROW_COLUMNS = ("round", *results.KEY, "ops", "rate", "p50_ns", "p99_ns", "client_cpu_ns", "target_cpu_ns", "target_ticks", "clock_ns", "loop_ns")
POINT_COLUMNS = (*results.KEY, "rounds", *(f"{metric}{suffix}" for metric in results.METRICS for suffix in ("", "_spread", "_best")), "p50_ns_ratio",
                 "p99_ns_ratio", "rate_ratio", "target_ticks")


def main():
    options = parse_options()
    procs.exit_on_signals()
    started = time.monotonic()
    bench.warn_if_busy()
    load_before = os.getloadavg()[0]
    out = options.out / f"{time.strftime('%Y%m%d-%H%M%S')}-{'full' if options.full else 'short'}" if options.out else \
        procs.new_run_dir("bench-peers")
    out.mkdir(parents=True, exist_ok=True)
    peers = [peer for peer in lineup.PEERS if any(word in peer.name for word in options.only.split(","))]
    sections = lineup.FULL if options.full else lineup.SHORT
    rows, missing = measure(peers, sections, options)
    summary = results.add_ratios(results.summarise(rows), lineup.REFERENCE)
    document = {
        "command": " ".join(["bench/peers/peers.py", *sys.argv[1:]]), "machine": bench.machine(), "load_before": load_before,
        "seconds": time.monotonic() - started, "rounds": options.rounds, "milliseconds": options.milliseconds, "versions": versions(),
        "profiled": bool(list((procs.ROOT / "build/profile").glob("*.profdata"))), "loop_ns": results.extent([row["loop_ns"] for row in rows if "loop_ns" in row]),
        "missing": sorted({f"{names[1]}: {reason}" for names, reason in missing.items()}), "promises": results.promises(summary),
        "not_ahead": [{"peer": entry["peer"], "op": entry["op"], "size": entry["size"], "depth": entry["depth"], "threads": entry["threads"],
                       "metric": metric, "ratio": ratio} for entry, metric, ratio in results.not_ahead(summary, peers)],
        "points": summary,
    }
    write(out, document, rows, peers, missing)
    summary_page = page(document, peers, missing, results.SHORT_VIEWS)
    print(json.dumps(document, indent=1) if options.json else f"{summary_page}\nmore tables, numbers and plots in {out}")
    is_complete = all(any(entry["peer"] == peer.name for entry in summary) for peer in peers if peer.kind == "terrace")
    return 0 if is_complete and not any(names[1].startswith("terrace") for names in missing) else 1


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all sizes, more rounds, longer points")
    parser.add_argument("--rounds", type=int, help=f"default {lineup.SHORT_ROUNDS}, with --full {lineup.FULL_ROUNDS}")
    parser.add_argument("--milliseconds", type=int, help=f"measured time of each point; default {lineup.SHORT_MILLISECONDS}, with --full {lineup.FULL_MILLISECONDS}")
    parser.add_argument("--only", default="", help="only peers whose names contain one of these comma-separated words")
    parser.add_argument("--out", type=pathlib.Path, help="directory of the results (default results/bench-peers)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    options.rounds = options.rounds or (lineup.FULL_ROUNDS if options.full else lineup.SHORT_ROUNDS)
    options.milliseconds = options.milliseconds or (lineup.FULL_MILLISECONDS if options.full else lineup.SHORT_MILLISECONDS)
    return options


def measure(peers, sections, options):
    """Returns all rows, and the reasons for missing ones: {(section, peer) or (section, peer, op, size): reason}."""
    rows, missing = [], {}
    for index in range(options.rounds):
        for section in sections:
            if index >= section.rounds_max:
                continue
            with hugepages.reserve(section.huge_pages) as are_available:
                if are_available:
                    measure_once(section, index, peers, options, rows, missing)
                else:
                    missing[section.name, f"section {section.name}"] = f"{section.huge_pages} huge pages of 2 MiB are not available"
    return rows, missing


def measure_once(section, index, peers, options, rows, missing):
    """One round of a section. Each round begins with another peer."""
    chosen = section.peers_of(peers)
    for peer in chosen[index % max(len(chosen), 1):] + chosen[:index % max(len(chosen), 1)]:
        bench.progress(f"round {index + 1} of {options.rounds}, {section.name}: {peer.title} ...")
        begun = time.monotonic()
        found, reason = run(peer, section, options.milliseconds)
        bench.progress(f"{time.monotonic() - begun:.1f} s")
        if reason:
            bench.progress(f"{peer.title}: {reason}")
            missing[section.name, peer.name] = reason
        for row in found:
            key = {"round": index, "section": section.name, "peer": peer.name}
            if "missing" in row:
                missing[section.name, peer.name, row["op"], row["size"]] = row["missing"]
            else:
                rows.append({**key, **results.with_cpu_ns(row)})


def run(peer, section, milliseconds):
    """Returns the rows that the peer's client printed, and its error, if any."""
    program = PROGRAMS / peer.program
    if not program.exists():
        return [], f"{program.name} could not be built"
    if peer.store and not shutil.which(peer.store):
        return [], f"{peer.store} is not installed"
    points = section.points_of(peer)
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        socket_path = pathlib.Path(directory, "socket")
        connections = max(threads for _, _, _, threads in points)
        common = ["--socket", socket_path, "--region", section.region, "--memory", section.memory or peer.memory, "--flavour", peer.flavour, "--connections", connections]
        target = start_target(peer, program, common, socket_path, section.region, directory)
        try:
            wanted = ",".join(":".join(map(str, point)) for point in points)
            argv = command(peer, program, "client", *common, "--points", wanted, "--milliseconds", milliseconds)
            if peer.store:
                argv += ["--target", str(target.process.pid)]
            limit_s = 60 + len(points) * milliseconds / 1000 * 4
            client = procs.run_one(argv, directory, "client", timeout_s=limit_s)
        finally:
            if target:
                # Targets other than stores end when their client disconnects.
                if peer.store or target.wait(procs.STOP_GRACE_S) is None:
                    target.stop()
        return parse(client, target)


def start_target(peer, program, common, socket_path, region, directory):
    if peer.alone:
        return None
    if peer.store:
        target = procs.Program(store_command(peer.store, socket_path, region), directory, "target")
        deadline = time.monotonic() + 10
        while not socket_path.exists() and target.wait(0.02) is None and time.monotonic() < deadline:
            pass
        return target
    return procs.Program(command(peer, program, "target", *common), directory, "target")


def command(peer, program, *arguments):
    argv = [str(program), *map(str, arguments)]
    return procs.under_terrace(argv, "--path", peer.path) if peer.path else argv


def store_command(store, socket_path, region):
    if store == "redis-server":
        return [store, "--port", "0", "--unixsocket", socket_path, "--save", "", "--appendonly", "no"]
    if store == "memcached":
        as_root = ["-u", "root"] if os.getuid() == 0 else []
        return [store, "-s", socket_path, "-m", "2048", "-I", "2m", *as_root]
    return [store, "--foreground", "--unix", socket_path, "memory", str(region)]


def parse(client, target):
    lines = [json.loads(line) for line in client.out.splitlines() if line.startswith("{") and line.endswith("}")]
    clock_ns = next((line["clock_ns"] for line in lines if "clock_ns" in line), None)
    rows = [{**line, "clock_ns": clock_ns} for line in lines if "op" in line]
    if client.status == 0:
        return rows, None
    errors = [text.strip().splitlines()[-1] for text in (client.err, target.outcome().err if target else "") if text.strip()]
    return rows, f"client {client.verdict}: {'; '.join(errors)}"


def versions():
    """Versions of the peers' Debian packages."""
    packages = ("libucx0", "libfabric1", "redis-server", "memcached", "nbdkit", "libnbd0")
    query = ["dpkg-query", "-W", "-f", "${Package} ${Version}\\n", *packages]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split("\n")[:-1]
    except OSError:
        return []


# ---- output -----------------------------------------------------------------------------------------------------------


def write(out, document, rows, peers, missing):
    (out / "peers.json").write_text(json.dumps(document, indent=1) + "\n")
    write_csv(out / "rows.csv", ROW_COLUMNS, rows)
    write_csv(out / "points.csv", POINT_COLUMNS, document["points"])
    (out / "tables.md").write_text(page(document, peers, missing))
    for name, picture in pictures(document["points"], peers):
        (out / f"{name}.svg").write_text(picture)


def write_csv(path, columns, entries):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for entry in entries:
            writer.writerow({name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in entry.items()})


def page(document, peers, missing, views=results.VIEWS):
    """The report as Markdown."""
    machine = document["machine"]
    lines = [f"`{document['command']}`: {document['rounds']} rounds, {document['milliseconds']} ms for each point, {machine['cpu']}, "
             f"{machine['cores']} cores, Linux {machine['kernel']}, load before {document['load_before']:.1f}, "
             f"{document['seconds']:.0f} s. {', '.join(document['versions'])}. Terrace {'after' if document['profiled'] else 'without'} `make profile`."
             f" {loops(document['loop_ns'])}", "",
             "Values are medians of the rounds, ± half of the range from the smallest to the largest; in brackets, the factor by which "
             "Terrace (local, verbs, shared memory) is better: above 1 it is ahead.", "",
             "## Promised values", ""]
    for promise in document["promises"]:
        sign = "at least" if promise["at_least"] else "at most"
        if promise["value"] is None:
            lines.append(f"- {promise['text']}: not measured ({sign} {promise['threshold']:g})")
            continue
        best = f", best rounds {promise['best']:.3g}" if promise["best"] not in (None, promise["value"]) else ""
        memcpy = f", memcpy {promise['memcpy']:.3g}" if promise["memcpy"] is not None else ""
        verdict = "met" if promise["met"] else "NOT MET"
        lines.append(f"- {promise['text']}: **{promise['value']:.3g}**{best}{memcpy} ({sign} {promise['threshold']:g}: {verdict})")
    lines += ["", "## Points at which Terrace is not ahead", ""]
    lines += [f"- {line}" for line in behind(document["not_ahead"], peers)] or ["None of the measured points."]
    if document["missing"]:
        lines += ["", "## Missing points", "", *(f"- {each}" for each in document["missing"])]
    lines += ["", "## Random offsets in 256 MiB", results.tables(document["points"], peers, missing, views=views)]
    for section, title in (("huge", "256 MiB, in huge pages"), ("large", "2 GiB"), ("hot", "1 MiB")):
        text = results.tables(document["points"], peers, missing, section, views)
        if text:
            lines += ["", f"## Random offsets in {title}", text]
    return "\n".join([*lines, ""])


def loops(extent):
    """The speed of the processors during the run."""
    if extent is None:
        return ""
    least, median, most = extent
    return f"An iteration of a loop without memory accesses took {least:.2f} to {most:.2f} ns before and after the points, {median:.2f} in the median."


def behind(not_ahead, peers):
    """A line for each point at which a peer is ahead of Terrace."""
    titles = {peer.name: peer.title for peer in peers}
    points = {}
    for each in not_ahead:
        shape = "" if each["depth"] == 1 else " by two threads" if each["threads"] == 2 else " by one thread"
        metric = {"p50_ns": "p50", "p99_ns": "p99", "rate": "rate at depth 16"}[each["metric"]] + shape
        points.setdefault((each["op"], each["size"], metric), []).append(f"{titles[each['peer']]} {each['ratio']:.2f}")
    return [f"{op} of {results.size_name(size)}, {metric}: {', '.join(found)}" for (op, size, metric), found in sorted(points.items())]


def pictures(summary, peers):
    for op in ("get", "put", "message"):
        for metric, depth, scale, label in (("p50_ns", 1, 1e-3, "latency p50, us"), ("rate", 16, 1e-3, "thousands per second, depth 16, one thread")):
            series = {}
            for peer in peers:
                series[peer.title] = [(entry["size"], entry[metric] * scale) for entry in summary
                                      if (entry["section"], entry["peer"], entry["op"], entry["depth"], entry["threads"])
                                      == ("main", peer.name, op, depth, 1) and entry[metric]]
            picture = chart.render(f"{op}, random offsets in 256 MiB" if op != "message" else "message and its answer", series, label)
            if picture:
                yield f"{op}-{'latency' if depth == 1 else 'rate'}", picture


if __name__ == "__main__":
    sys.exit(main())
