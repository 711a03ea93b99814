"""The tables and the plot of results.json."""

import json
import statistics
from xml.sax.saxutils import escape

UDP_BAR_US = 10
STATIC_BAR_PERCENT = 15
COLOURS = {"75": "#5b9bd5", "50": "#0f4c81"}


def median(runs, key):
    values = [run[key] for run in runs if key in run]
    return statistics.median(values) if values else None


def systems_of(program):
    return [name for name in program if name not in ("bytes", "all local")]


def right_runs(program, system, share):
    return [run for run in program[system].get(share, []) if run["is_right"]]


def failures(program, system, share):
    """A note of the runs that failed."""
    runs = program[system].get(share, [])
    failed = len(runs) - len(right_runs(program, system, share))
    return f" ({failed} of {len(runs)} failed)" if failed else ""


def slowdown(program, system, share, key="seconds"):
    """The time over that with all memory; None if no run succeeded."""
    runs = right_runs(program, system, share)
    return median(runs, key) / median(program["all local"]["100"], key) if runs else None


def over_static(program, system, share):
    """The share of the time by which a memory node is slower than one of the same transport that reserves all memory."""
    transport = ", ".join(system.split(", ")[:2])
    static = f"{transport}, static"
    if system == static or static not in program or "prefetch" in system:
        return None
    runs, static_runs = right_runs(program, system, share), right_runs(program, static, share)
    if not runs or not static_runs:
        return None
    return median(runs, "seconds") / median(static_runs, "seconds") - 1


def static_table(name, program):
    """Slowdown against the baseline of section 5.2 of the ODRP paper."""
    lines = [f"## {name}: time over that of `static`", "", "| system | 75 % local | 50 % local |", "|---|---|---|"]
    for system in systems_of(program):
        slower = [over_static(program, system, share) for share in ("75", "50")]
        if any(share is not None for share in slower):
            cells = ["" if share is None else f"{share * 100:+.0f} %" for share in slower]
            lines.append(f"| {system} | {' | '.join(cells)} |")
    bar = f"The bar for ODRP, which is `far` without another name: +{STATIC_BAR_PERCENT} %."
    return [*lines, "", bar, ""] if len(lines) > 4 else []


def time_table(name, program):
    lines = [f"## {name}", "", f"{program['bytes'] >> 20} MiB. All local: {median(program['all local']['100'], 'seconds'):.2f} s.", "",
             "| system | 75 % local: seconds | over all local | 50 % local: seconds | over all local | private memory at 50 % |",
             "|---|---|---|---|---|---|"]
    for system in systems_of(program):
        cells = [system]
        for share in ("75", "50"):
            ratio = slowdown(program, system, share)
            seconds = median(right_runs(program, system, share), "seconds")
            note = failures(program, system, share)
            absent = ["failed" + note, "failed"] if note else ["not run", ""]
            cells += absent if ratio is None else [f"{seconds:.2f}{note}", f"{ratio:.2f}"]
        most = median(right_runs(program, system, "50"), "most_bytes")
        cells.append("" if most is None else f"{most / program['bytes'] * 100:.0f} %")
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def fault_table(program, reads):
    lines = ["## Touches of absent pages", "",
             f"Random pages of {program['bytes'] >> 20} MiB, of which half is local; microseconds.", "",
             "| system | p50 | p99 | a READ of 4 KiB: p50 | p99 | difference of p50 |", "|---|---|---|---|---|---|"]
    for system in systems_of(program):
        runs = right_runs(program, system, "50")
        p50, p99 = median(runs, "p50_us"), median(runs, "p99_us")
        if p50 is None:
            lines.append(f"| {system} | failed | | | | |")
            continue
        read = next((read for name, read in reads.items() if f", {name}" in system), None)
        beside = [f"{read['p50_us']:.1f}", f"{read['p99_us']:.1f}", f"{p50 - read['p50_us']:+.1f}"] if read else ["", "", ""]
        lines.append(f"| {' | '.join([system, f'{p50:.1f}', f'{p99:.1f}', *beside])} |")
    return [*lines, "", f"The bar by UDP: {UDP_BAR_US} us above the READ.", ""]


def tables(results):
    lines = []
    for name, program in results["programs"].items():
        is_fault = name == "random touches"
        lines += fault_table(program, results["reads"]) if is_fault else time_table(name, program) + static_table(name, program)
    return "\n".join(lines)


def plot(results):
    """Bars of the time over all local, by program and system."""
    rows = [(name, system, share, slowdown(program, system, share)) for name, program in results["programs"].items()
            if name != "random touches" for system in systems_of(program) for share in ("75", "50")]
    rows = [row for row in rows if row[3] is not None]
    if not rows:
        return None
    row, left, width = 16, 290, 820
    most = max(ratio for *_, ratio in rows)
    height = 60 + row * len(rows)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
             f'<rect width="{width}" height="{height}" fill="white"/>',
             '<text x="16" y="24" font-size="15">Time over all local (light: 75 % local, dark: 50 %); less is better</text>']
    for index, (name, system, share, ratio) in enumerate(rows):
        y = 40 + row * index
        length = ratio / most * (width - left - 70)
        parts.append(f'<text x="{left - 8}" y="{y + 11}" text-anchor="end">{escape(f"{name}, {system}, {share} %")}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{row - 4}" fill="{COLOURS[share]}"/>')
        parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 11}">{ratio:.2f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def write(results, out):
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "tables.md").write_text(tables(results))
    picture = plot(results)
    if picture:
        (out / "slowdown.svg").write_text(picture)
