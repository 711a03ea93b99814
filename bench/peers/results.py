"""Medians, spread, ratios and tables of the programs' rows. The module starts no process and reads no clock."""

import statistics

METRICS = ("p50_ns", "p99_ns", "rate", "client_cpu_ns", "target_cpu_ns")
LESS_IS_BETTER = {"p50_ns": True, "p99_ns": True, "rate": False, "client_cpu_ns": True, "target_cpu_ns": True}
KEY = ("section", "peer", "op", "size", "depth", "threads")


def with_cpu_ns(row):
    """A program's row, with processor times per operation in nanoseconds."""
    ops = max(row["ops"], 1)
    return {**row, "client_cpu_ns": row["client_cpu_s"] * 1e9 / ops, "target_cpu_ns": row["target_cpu_s"] * 1e9 / ops}


def summarise(rows):
    """An entry for each point, over its rounds: medians, and spread as (largest - smallest) / median."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in KEY), []).append(row)
    summary = []
    for key, members in groups.items():
        entry = {**dict(zip(KEY, key)), "rounds": len(members), "target_ticks": sum(row["target_ticks"] for row in members),
                 "target_cpu_s": sum(row["target_cpu_s"] for row in members)}
        for metric in METRICS:
            values = [row[metric] for row in members if row.get(metric) is not None]
            entry[metric] = statistics.median(values) if values else None
            entry[f"{metric}_spread"] = spread(values)
            # Other load on the machine only adds cost, so the best round has the least of it.
            entry[f"{metric}_best"] = (min if LESS_IS_BETTER[metric] else max)(values) if values else None
        summary.append(entry)
    return summary


def extent(values):
    """The smallest value, the median and the largest value; None without values."""
    return [min(values), statistics.median(values), max(values)] if values else None


def spread(values):
    if not values or not (middle := statistics.median(values)):
        return None
    return (max(values) - min(values)) / middle


def times_better(metric, reference, other):
    """The factor by which `reference` is better than `other`: above 1 it is ahead."""
    if not reference or not other:
        return None
    return other / reference if LESS_IS_BETTER[metric] else reference / other


def add_ratios(summary, reference):
    """Adds to each value the factor by which the reference peer is better at the same point."""
    best = {_point(entry): entry for entry in summary if entry["peer"] == reference}
    for entry in summary:
        other = best.get(_point(entry))
        for metric in ("p50_ns", "p99_ns", "rate"):
            entry[f"{metric}_ratio"] = times_better(metric, other[metric], entry[metric]) if other else None
    return summary


def _point(entry):
    return tuple(entry[name] for name in KEY if name != "peer")


def find(summary, **wanted):
    """The only entry with these values, or None."""
    found = [entry for entry in summary if all(entry[name] == value for name, value in wanted.items())]
    return found[0] if len(found) == 1 else None


def not_ahead(summary, peers, section="main"):
    """Points at which a peer other than Terrace and the limits is better than the reference, worst first: (entry, metric, ratio)."""
    others = {peer.name for peer in peers if peer.kind == "other"}
    found = [(entry, metric, entry[f"{metric}_ratio"]) for entry in summary if entry["peer"] in others and entry["section"] == section
             for metric in ("p50_ns", "p99_ns", "rate") if entry[f"{metric}_ratio"] is not None and entry[f"{metric}_ratio"] < 1
             and not (metric == "rate" and entry["depth"] == 1)]
    return sorted(found, key=lambda each: each[2])


# ---- tables -----------------------------------------------------------------------------------------------------------


def size_name(size):
    if size % (1 << 20) == 0:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size % 1024 == 0 else f"{size} B"


def value_text(metric, value):
    if value is None:
        return ""
    if metric != "rate":
        return f"{value / 1e3:.3g} us" if value < 1e6 else f"{value / 1e6:.3g} ms"
    return f"{value / 1e6:.3g} M/s" if value >= 1e6 else f"{value / 1e3:.3g} k/s"


def spread_text(spread):
    return "" if spread is None else f" ±{spread * 50:.0f}%"


def ratio_text(ratio):
    return "" if ratio is None else f" ({ratio:.2f})" if ratio < 10 else f" ({ratio:.0f})"


# The tables: metric, depth, threads, title.
VIEWS = (
    ("p50_ns", 1, 1, "latency, p50"),
    ("p99_ns", 1, 1, "latency, p99"),
    ("rate", 16, 1, "rate at depth 16, one thread"),
    ("rate", 16, 2, "rate at depth 16, two threads"),
    ("client_cpu_ns", 16, 1, "processor time of the client for each, at depth 16"),
    ("target_cpu_ns", 16, 1, "processor time of the target for each, at depth 16"),
)


SHORT_VIEWS = (VIEWS[0], VIEWS[2])


def tables(summary, peers, missing, section="main", views=VIEWS):
    """Markdown: a table for each operation and view, peers down, sizes across."""
    lines = []
    for op in ("get", "put", "message", "atomic"):
        for metric, depth, threads, title in views:
            entries = [entry for entry in summary if (entry["section"], entry["op"], entry["depth"], entry["threads"])
                       == (section, op, depth, threads)]
            if entries:
                lines += ["", f"### {op}: {title}", "", *_table(entries, peers, missing, section, op, metric)]
    return "\n".join(lines)


def _table(entries, peers, missing, section, op, metric):
    sizes = sorted({entry["size"] for entry in entries})
    lines = [f"| | {' | '.join(size_name(size) for size in sizes)} |", f"|---|{'---|' * len(sizes)}"]
    for peer in peers:
        if op not in peer.ops:
            continue
        cells = []
        for size in sizes:
            entry = find(entries, peer=peer.name, size=size)
            reason = missing.get((section, peer.name, op, size)) or ("missing" if (section, peer.name) in missing else None)
            if entry is None or entry[metric] is None:
                cells.append(f"*{reason}*" if reason else "")
            else:
                spread_of_rounds = spread_text(entry[f"{metric}_spread"]) if entry["rounds"] > 1 else ""
                cells.append(value_text(metric, entry[metric]) + spread_of_rounds + ratio_text(entry.get(f"{metric}_ratio")))
        if any(cells):
            lines.append(f"| {peer.title} | {' | '.join(cells)} |")
    return lines


# ---- the promised values ----------------------------------------------------------------------------------------------


# Interfaces of Terrace, as named in the report.
_INTERFACES = {"verbs": "verbs", "native": "native", "calls": "native calls"}


def promises(summary):
    """The promised values as medians (None if not measured), and for latencies also those of the best rounds and of memcpy."""
    shown = []

    def judge(text, value, threshold, at_least, best=None, memcpy=None):
        met = value is not None and (value >= threshold if at_least else value <= threshold)
        shown.append({"text": text, "value": value, "best": best, "memcpy": memcpy, "threshold": threshold, "at_least": at_least, "met": met})

    for interface in ("verbs", "native", "calls"):
        for op in ("get", "put"):
            for depth in (1, 16):
                at = {"section": "large", "op": op, "size": 4096, "depth": depth, "threads": 1}
                judge(f"{op} of 4 KiB from 2 GiB, {_INTERFACES[interface]}, depth {depth}: share of memcpy's rate",
                      _ratio(summary, "rate", f"terrace-local-{interface}-shared", "memcpy-shared", at), 0.6, True)
    for interface, threshold in (("calls", 100), ("native", 100), ("verbs", 250)):
        for section, where in (("main", "256 MiB"), ("huge", "256 MiB in huge pages"), ("hot", "1 MiB")):
            at = {"section": section, "op": "get", "size": 8, "depth": 1, "threads": 1}
            mine, memcpy = (find(summary, peer=name, **at) or {} for name in (f"terrace-local-{interface}-shared", "memcpy-shared"))
            judge(f"get of 8 B from {where}, {_INTERFACES[interface]}: p50, ns", mine.get("p50_ns"), threshold, False, mine.get("p50_ns_best"), memcpy.get("p50_ns"))
    local = [entry for entry in summary if entry["peer"].startswith("terrace-local") and entry["op"] != "message"]
    by_target = [entry for entry in local if entry["op"] == "atomic" and entry["peer"].endswith("private")]
    direct = [entry for entry in local if entry not in by_target]
    for points, entries in (("one-sided points over shared memory, except atomics on private memory", direct),
                          ("points with atomics on private memory", by_target)):
        for name, metric, scale in (("utime+stime of the target, ticks", "target_ticks", 1), ("run time of the target's threads, us", "target_cpu_s", 1e6)):
            judge(f"{name}, in {points}", sum(entry[metric] for entry in entries) * scale if entries else None, 0, False)
    at = {"section": "main", "op": "message", "size": 64, "depth": 1, "threads": 1}
    for interface in ("verbs", "native"):
        judge(f"message of 64 B, {interface}: round trip over that of bare shared memory",
              _ratio(summary, "p50_ns", f"terrace-local-{interface}-shared", "shm", at), 2, False)
    return shown


def _ratio(summary, metric, peer, limit, at):
    mine, its = (find(summary, peer=name, **at) for name in (peer, limit))
    return mine[metric] / its[metric] if mine and its and mine[metric] and its[metric] else None
