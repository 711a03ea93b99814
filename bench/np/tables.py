"""Tables, bars and plots of the results, with the values of the NP-RDMA paper."""

import json
import statistics
from dataclasses import dataclass

import chart
from sections import GIB, SECTIONS

US, PERCENT = 1e3, 100
PRESENT_RATIO_MAX, PRESENT_NS_MAX, BANDWIDTH_RATIO_MIN = 1.03, 50, 0.97
MINOR_NS_MAX, MAJOR_NS_MAX, OTHERS_RATIO_MAX = 6000, 10_000, 1.10
TITLES = {"udp": "UDP", "local": "within the host", "none": ""}

# Values of the paper, with their sections.
PAPER = {
    "present": "NP-RDMA: READ + 0.4 % to 1 %, unsignalled WRITE almost the rate of pinned memory, signalled small WRITE half of it (5.2, figures 7, 10)",
    "minor": "NP-RDMA: 3.5 us for a READ of 2 B (2.8 us above pinned), 5.7 us for a WRITE (1.9 us above); ODP: 2 ms (5.3, figure 8)",
    "major": "NP-RDMA: 60 us for a READ, 57 us for a WRITE, with its SSD; ODP: 10 to 30 times as much (5.3, figure 8)",
    "others": "in ODP a message with a page fault blocks all later ones; NP-RDMA goes on with what may be reordered (3.3, 5.3)",
    "registration": "pinned: 50 us + 400 ms per GB; NP-RDMA: 135 us + 20 ms per GB (5.4, table 2)",
}


@dataclass(frozen=True)
class Bar:
    """A limit, and how far a number is from it."""

    name: str
    found: str
    limit: str
    is_met: bool


class Points:
    """The points of a section by one transport."""

    def __init__(self, document):
        self.rows = {(point["case"], point["op"], point["size"]): point for point in document["points"]}
        self.rounds = document.get("rows", ())

    def get(self, case, op, size, metric="p50_ns"):
        return self.rows.get((case, op, size), {}).get(metric)

    def keys(self, metric):
        """Operations and sizes that have this metric, once each."""
        return list(dict.fromkeys((op, size) for (_, op, size), row in self.rows.items() if metric in row))

    def medians_of(self, case, op, size):
        """The median latency in each round."""
        return {row["round"]: row["p50_ns"] for row in self.rounds if (row["case"], row["op"], row["size"]) == (case, op, size)}

    def cases(self):
        return list(dict.fromkeys(case for case, op, _ in self.rows if case != "disk"))


def write(out):
    """Writes tables.md and plots of the results that are in `out`. Returns the tables, the results and the bars."""
    documents = [json.loads(path.read_text()) for section in SECTIONS for path in sorted(out.glob(f"{section.name}-*.json"), reverse=True)]
    bars, parts = [], []
    for document in documents:
        points = Points(document)
        found = BARS[document["section"]](points, document["path"])
        bars += found
        parts += [f"## {document['section']} {TITLES[document['path']]}".rstrip(), *TABLES[document["section"]](points),
                  *table(["bar", "found", "limit", ""], [[bar.name, bar.found, bar.limit, "met" if bar.is_met else "missed"] for bar in found]),
                  f"Paper: {PAPER[document['section']]}."]
    page = "\n\n".join(parts) + "\n"
    (out / "tables.md").write_text(page)
    for path in ("udp", "local"):
        drawing = chart.render(f"READs, {TITLES[path]}: pinned, paged (np), and a model of on-demand paging (odp)", series(documents, path), "median, us")
        if drawing:
            (out / f"reads-{path}.svg").write_text(drawing)
    return page, documents, bars


def series(documents, path):
    lines = {}
    for document in documents:
        if document["path"] == path and document["section"] in ("present", "minor", "major"):
            for point in document["points"]:
                if point["op"] == "READ" and point["case"] != "pin, touched before":
                    name = f"{point['case']}, {document['section']}".replace("present", "present pages").replace("minor", "first touch").replace("major", "page on the disk")
                    lines.setdefault(name, []).append((point["size"], point["p50_ns"] / US))
    return lines


def table(titles, rows):
    """A table in Markdown, as one part; nothing without rows."""
    if not rows:
        return []
    lines = [titles, ["---"] * len(titles), *rows]
    return ["\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)]


def size_text(size):
    return f"{size // GIB} GiB" if size >= GIB else f"{size // 1024} KiB" if size >= 1024 else f"{size} B"


def us(ns):
    return "" if ns is None else f"{ns / US:.2f}" if ns < 100 * US else f"{ns / US:.0f}"


def latencies(points):
    """p50 and p99 of each operation, for each case."""
    cases = points.cases()
    titles = ["us, p50 / p99", *cases]
    rows = [[f"{op} {size_text(size)}", *(f"{us(points.get(case, op, size))} / {us(points.get(case, op, size, 'p99_ns'))}"
                                          if points.get(case, op, size) else "" for case in cases)]
            for op, size in points.keys("p50_ns") if op != "read"]
    return table(titles, rows)


def rates(points):
    cases = points.cases()
    rows = [[f"{op} {size_text(size)}", *(f"{points.get(case, op, size, 'rate') / 1e3:.0f} k/s, {points.get(case, op, size, 'bytes_per_s') / 1e9:.2f} GB/s"
                                          for case in cases)] for op, size in points.keys("rate")]
    return table(["", *cases], rows)


def counted(points):
    """Shows that accesses found their pages, or did not."""
    rows = [[case, *(f"{points.get(case, 'counters', 0, name):.0f}" for name in ("hits", "misses", "pages_read"))]
            for case in points.cases() if points.get(case, "counters", 0, "misses") is not None]
    return table(["server's counters", "hits", "misses", "pages read"], rows)


def disk(points):
    ns = points.get("disk", "read", 4096)
    return [] if ns is None else [f"The disk, 4 KiB with O_DIRECT at depth 1: {us(ns)} us, p99 {us(points.get('disk', 'read', 4096, 'p99_ns'))} us."]


def registrations(points):
    rows = [[f"{size_text(size)} {op}", *(" / ".join(f"{points.get(case, op, size, metric) / 1e3:.3f}" for metric in ("register_us", "deregister_us"))
                                          for case in points.cases())] for op, size in points.keys("register_us")]
    return table(["ms, registration / deregistration", *points.cases()], rows)


TABLES = {
    "present": lambda points: latencies(points) + rates(points) + counted(points),
    "minor": lambda points: latencies(points) + counted(points),
    "major": lambda points: disk(points) + latencies(points) + counted(points),
    "others": lambda points: latencies(points) + counted(points),
    "registration": registrations,
}


def present_bars(points, _path):
    bars = []
    for op, size in points.keys("p50_ns"):
        pin, np = points.get("pin", op, size), points.get("np", op, size)
        limit = max(pin * PRESENT_RATIO_MAX, pin + PRESENT_NS_MAX)
        bars.append(Bar(f"{op} {size_text(size)}: np above pin", f"{np - pin:+.0f} ns ({(np / pin - 1) * PERCENT:+.1f} %)", f"{limit - pin:+.0f} ns", np <= limit))
    for op, size in points.keys("rate"):
        if op.startswith("unsignalled"):
            ratio = points.get("np", op, size, "rate") / points.get("pin", op, size, "rate")
            bars.append(Bar(f"{op} {size_text(size)}: np's rate", f"{ratio:.3f} of pin's", f"{BANDWIDTH_RATIO_MIN}", ratio >= BANDWIDTH_RATIO_MIN))
    return bars


def minor_bars(points, path):
    """The comparison is with memory that was touched before: pinned memory has no minor faults."""
    if path != "udp":
        return []
    above = {key: points.get("np", *key) - points.get("pin, touched before", *key) for key in points.keys("p50_ns")}
    return [Bar(f"{op} {size_text(size)}: np above touched memory", f"{us(ns)} us", f"{us(MINOR_NS_MAX)} us", ns <= MINOR_NS_MAX)
            for (op, size), ns in above.items()]


def major_bars(points, _path):
    """The median of the rounds' differences: the disk's latency changes from one round to the next."""
    disk_ns, bars = points.medians_of("disk", "read", 4096), []
    for op, size in points.keys("p50_ns"):
        if op == "READ":
            above = sorted(np_ns - disk_ns[index] for index, np_ns in points.medians_of("np", op, size).items())
            ns = statistics.median(above)
            spread = f"{us(ns)} us ({us(above[0])} to {us(above[-1])})"
            bars.append(Bar(f"{op} {size_text(size)}: np above the disk", spread, f"{us(MAJOR_NS_MAX)} us", ns <= MAJOR_NS_MAX))
    return bars


def others_bars(points, _path):
    (size,) = {size for op, size in points.keys("p50_ns") if op == "READ alone"}
    ratio = points.get("np", "READ beside it on another queue pair", size) / points.get("np", "READ alone", size)
    return [Bar("READ on another queue pair: np, of alone", f"{ratio:.3f}", f"{OTHERS_RATIO_MAX}", ratio <= OTHERS_RATIO_MAX)]


BARS = {
    "present": present_bars,
    "minor": minor_bars,
    "major": major_bars,
    "others": others_bars,
    "registration": lambda _points, _path: [],
}
