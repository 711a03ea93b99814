#!/usr/bin/env python3
"""Measures Terrace and bare UDP on this machine, in one run, and compares the ratios with the promised ones.

Each measurement is repeated, followed by its reference each time. The best of each counts, because other load on the machine only
slows them down. Writes all numbers and a plot to results/bench/. Exit status 0 if every threshold is met.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "scripts")]

import plan  # noqa: E402
import plot  # noqa: E402
from harness import perftest, procs  # noqa: E402

RESULTS = procs.ROOT / "results/bench"
TARGET_DIR = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or procs.ROOT / "target")
UDP_REFERENCE = TARGET_DIR / "release/examples/udp_reference"
REG_MR = procs.ROOT / "build/bench/reg_mr"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each measurement (default 3)")
    parser.add_argument("--only", default="", help="only measurements whose name contains this word")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    procs.exit_on_signals()
    run_dir = RESULTS / time.strftime("%Y%m%d-%H%M%S")
    run_dir.mkdir(parents=True)
    warn_if_busy()
    rows = [measure(each, options.rounds, run_dir) for each in plan.MEASUREMENTS if options.only.lower() in each.name.lower()]
    registration = measure_registration(run_dir) if options.only.lower() in "registration" else []
    document = {"machine": machine(), "rounds": options.rounds, "measurements": rows, "registration": registration}
    (run_dir / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
    (run_dir / "bench.svg").write_text(plot.render(rows))
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        show(rows, registration)
        print(f"\nnumbers and plot in {run_dir}")
    return 0 if all(row["meets_threshold"] for row in rows + registration) else 1


def measure(each, rounds, run_dir):
    progress(f"{each.name} ...")
    values, references = [], []
    for index in range(rounds):
        values.append(each.value(run_perftest(each, run_dir / each.name.replace(" ", "-") / str(index))))
        references.append(each.reference_value(run_reference(each.reference)))
    best = min if each.less_is_better else max
    value, reference = best(values), best(references)
    judged = each.judged(value, value / reference)
    return {
        "name": each.name,
        "command": " ".join((each.tool, *each.options)),
        "unit": each.unit,
        "value": value,
        "values": values,
        "reference": reference,
        "references": references,
        "reference_command": " ".join(("udp_reference", *each.reference)),
        "ratio": value / reference,
        "judged": "value" if each.absolute else "ratio",
        "less_is_better": each.less_is_better,
        "threshold": each.threshold,
        "target": each.target,
        "meets_threshold": each.satisfies(judged, each.threshold),
        "meets_target": each.target is None or each.satisfies(judged, each.target),
        "score": each.threshold / judged if each.less_is_better else judged / each.threshold,
    }


def run_perftest(each, log_dir):
    port = procs.free_port()
    server = procs.under_terrace([each.tool, "-F", "-p", str(port), *each.options])
    pair = procs.run_pair(server, [*server, procs.HOST], port, log_dir, timeout_s=120)
    table = perftest.parse_table(pair.client.out)
    if pair.client.status != 0 or not table:
        sys.exit(f"bench: {each.tool}: client {pair.client.verdict}, server {pair.server.verdict} {pair.note}; see {log_dir}")
    return table[-1]


def run_reference(arguments):
    shown = subprocess.run([UDP_REFERENCE, *arguments, "--json"], capture_output=True, text=True, timeout=60)
    if shown.returncode != 0:
        sys.exit(f"bench: udp_reference: {shown.stderr.strip()}")
    return json.loads(shown.stdout)


def measure_registration(run_dir):
    progress("registration ...")
    shown = procs.run_one(procs.under_terrace([str(REG_MR)]), run_dir / "registration", timeout_s=120)
    if shown.status != 0:
        sys.exit(f"bench: reg_mr: {shown.verdict}: {shown.err.strip()}")
    sizes = {size["bytes"]: size for size in json.loads(shown.out)["sizes"]}
    large, small = sizes[plan.REGISTRATION_LARGE_BYTES], sizes[plan.REGISTRATION_SMALL_BYTES]
    rows = []
    for size in sizes.values():
        ratio = size["median"] / small["median"]
        is_large = size is large
        is_met = not is_large or (large["median"] < plan.REGISTRATION_US_MAX and ratio <= plan.REGISTRATION_RATIO_MAX)
        rows.append({**size, "ratio_to_4k": ratio, "meets_threshold": is_met})
    return rows


def progress(text):
    print(f"bench: {text}", file=sys.stderr, flush=True)


def warn_if_busy():
    load = os.getloadavg()[0]
    if load > 0.5:
        progress(f"WARNING: the machine is busy (load {load:.1f} on {os.cpu_count()} cores); the numbers will be worse than without load")


def machine():
    models = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {"cpu": models[0] if models else platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()}


def show(rows, registration):
    title = ("measurement", "Terrace", "bare UDP", "ratio", "threshold", "target", "")
    lines = [title]
    for row in rows:
        absolute = row["judged"] == "value"
        sign = "<=" if row["less_is_better"] else ">="

        def limit(number):
            return "" if number is None else f"{sign} {number:g}" + (f" {row['unit']}" if absolute else "")

        verdict = "below the threshold" if not row["meets_threshold"] else "ok" if row["meets_target"] else "ok, target missed"
        lines.append((row["name"], f"{row['value']:.2f} {row['unit']}", f"{row['reference']:.2f} {row['unit']}",
                      f"{row['ratio']:.2f}", limit(row["threshold"]), limit(row["target"]), verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(title))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    if registration:
        print(f"\nibv_reg_mr (threshold: 64 GiB below {plan.REGISTRATION_US_MAX:g} us and within "
              f"{plan.REGISTRATION_RATIO_MAX:g} times 4 KiB)")
    for row in registration:
        size = f"{row['bytes'] >> 10} KiB" if row["bytes"] < 1 << 20 else f"{row['bytes'] >> 20} MiB"
        print(f"  {size:>10}  median {row['median']:.2f} us  99th percentile {row['p99']:.2f} us"
              f"  {row['ratio_to_4k']:.2f} times 4 KiB" + ("" if row["meets_threshold"] else "  above the threshold"))


if __name__ == "__main__":
    sys.exit(main())
