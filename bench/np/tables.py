"""Tables, thresholds and plots of the results, with the values of the NP-RDMA paper."""

import json
import statistics
from dataclasses import dataclass

import chart
from sections import GIB, SECTIONS, TOUCHED

US, PERCENT = 1e3, 100
PRESENT_RATIO_MAX, PRESENT_NS_MAX = 1.03, 50
UNSIGNALLED_RATIO_MIN, SIGNALLED_RATIO_MIN, SIGNALLED_SMALL_BYTES = 0.97, 0.5, 512
MINOR_NS_MAX, MINOR_BYTES_MAX, MAJOR_NS_MAX = 6000, 1024, 10_000
# On other queue pairs there is to be no delay; the measurement resolves three percent.
SAME_RATIO_MAX, OTHER_RATIO_MAX = 1.10, 1.03
ALONE, SAME, OTHER = "READ alone", "READ behind an absent page on the queue pair", "READ beside an absent page on another queue pair"
TITLES = {"udp": "UDP", "local": "within the host", "none": ""}

# Values of the paper, with their sections.
PAPER = {
    "buffers": "registered memory is 39 % to 97 % faster than reading pieces into a small buffer and copying; a registration for each READ costs "
               "more, about 50 us (2.2.1, figure 1)",
    "present": "READ + 0.4 % to 1 %; a WRITE is there 0.5 us later, and its completion takes twice as long; unsignalled WRITEs have almost the rate of "
               "pinned memory, signalled small ones half of it (5.2, figures 7, 10). np-user: small requests take 10 to 20 times as long (6.1)",
    "minor": "3.5 us for a READ of 2 B (2.8 us above pinned), 5.7 us for a WRITE (1.9 us above); 10 us above pinned for 2 KB; ODP: 2 ms or 16 ms. "
             "Rates of 2 B: a third (READ) and a quarter (WRITE) of pinned (5.3, figures 8, 9)",
    "major": "60 us for a READ, 57 us for a WRITE, with its SSD; ODP: 10 to 30 times as much. Its SSD swaps 1 GB/s in (5.3, figures 8, 9)",
    "others": "in ODP a message with a page fault blocks all later ones; NP-RDMA goes on with what may be reordered (3.3, 5.3)",
    "slow-others": "as above; a disk of 60 us",
    "store": "the average IO of 8 KB takes 10 % longer than with all of the pool in memory (6.2, figure 11)",
    "registration": "pinned: 50 us + 400 ms per GB; NP-RDMA: 135 us + 20 ms per GB (5.4, table 2)",
    "control": "pinned and NP-RDMA: library init 43 and 49 ms, create QP 45 and 67 us, create CQ 29 and 56 us, QP init 12 and 19 us, swap out 75 and "
               "78 us. Memory: 12 B per page; 1.16 MB and 16 B for each region of the peer per QP; 128 KB per CQ (5.4, tables 1 and 2)",
}


@dataclass(frozen=True)
class Bar:
    """A threshold, and the number that is compared with it."""

    name: str
    found: str
    limit: str
    is_met: bool


class Points:
    """The points of a section by one transport."""

    def __init__(self, document):
        self.rows = {(point["case"], point["op"], point["size"]): point for point in document["points"]}

    def get(self, case, op, size, metric="p50_ns"):
        return self.rows.get((case, op, size), {}).get(metric)

    def slices(self, case, op, size):
        return self.rows.get((case, op, size), {}).get("slices", [])

    def keys(self, metric):
        """Operations and sizes that have this metric, once each."""
        return list(dict.fromkeys((op, size) for (case, op, size), row in self.rows.items() if metric in row and case != "disk"))

    def cases(self):
        return list(dict.fromkeys(case for case, _, _ in self.rows if case != "disk"))

    def paged_by_protocol(self):
        """The cases with thresholds: NP-RDMA, and Terrace's own NIC."""
        return [case for case in self.cases() if case in ("np", "terrace")]

    def compared(self, case, base, op, size, other_op=None):
        """Pairs of slices that were measured one after the other."""
        return list(zip(self.slices(case, op, size), self.slices(base, other_op or op, size)))

    def disk_of(self, op, size, turn_count=10):
        """The disk's slices that were measured beside those of an operation."""
        order = [key for key in dict.fromkeys((op, size) for (_, op, size), row in self.rows.items() if "slices" in row and op != "read")]
        first = order.index((op, size)) * turn_count
        return self.slices("disk", "read", 4096)[first:first + turn_count]


def ratio_of(pairs):
    return statistics.median(left / right for left, right in pairs)


def difference_of(pairs):
    return statistics.median(left - right for left, right in pairs)


def write(out):
    """Writes tables.md and plots of the results that are in `out`. Returns the tables, the results and the thresholds."""
    documents = [json.loads(path.read_text()) for section in SECTIONS for path in sorted(out.glob(f"{section.name}-*.json"), reverse=True)]
    bars, parts = [], []
    for document in documents:
        points = Points(document)
        found = BARS[document["section"]](points, document["path"])
        bars += found
        parts += [f"## {document['section']} {TITLES[document['path']]}".rstrip(),
                  f"`{document['command']}`; {document['figures']} of the paper; load {document['load_before']:.1f} before.",
                  *TABLES[document["section"]](points),
                  *table(["threshold", "found", "limit", ""], [[bar.name, bar.found, bar.limit, "met" if bar.is_met else "missed"] for bar in found]),
                  f"Paper: {PAPER[document['section']]}."]
    page = "\n\n".join(parts) + "\n"
    (out / "tables.md").write_text(page)
    for path in ("udp", "local"):
        for name, (title, unit, lines) in drawings(documents, path).items():
            drawing = chart.render(f"{title}, {TITLES[path]}", lines, unit)
            if drawing:
                (out / f"{name}-{path}.svg").write_text(drawing)
    return page, documents, bars


WHAT = {"present": "present pages", "minor": "first touch", "major": "page on the disk"}


def drawings(documents, path):
    """Plots in the manner of the paper's figures 7 to 10, with a line for each mode."""
    found = {document["section"]: Points(document) for document in documents if document["path"] == path and document["section"] in WHAT}
    plots = {}
    for op in ("READ", "WRITE"):
        lines = {f"{case}, {WHAT[section]}": line for section, points in found.items() for case, line in lines_of(points, op, "p50_ns", US).items()}
        plots[f"{op.lower()}s"] = (f"{op}s", "median, us", lines)
    # `WRITEs` are those that meet absent pages, all signalled.
    for name, op in (("read-rates", "READs"), ("unsignalled-rates", "unsignalled WRITEs"), ("signalled-rates", "signalled WRITEs"), ("fault-rates", "WRITEs")):
        lines = {f"{case}, {WHAT[section]}": line for section, points in found.items() for case, line in lines_of(points, op, "bytes_per_s", 1e6).items()}
        plots[name] = (f"{op}, 64 in flight", "MB/s", lines)
    return plots


def lines_of(points, op, metric, unit):
    return {case: [(size, points.get(case, op, size, metric) / unit) for other, size in points.keys(metric) if other == op and points.get(case, op, size, metric)]
            for case in points.cases()}


def table(titles, rows):
    """A table in Markdown, as one part; nothing without rows."""
    if not rows:
        return []
    lines = [titles, ["---"] * len(titles), *rows]
    return ["\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)]


def size_text(size):
    return "" if size == 0 else f"{size // GIB} GiB" if size >= GIB else f"{size // 1024} KiB" if size >= 1024 else f"{size} B"


def us(ns):
    return "" if ns is None else f"{ns / US:.2f}" if abs(ns) < 100 * US else f"{ns / US:.0f}"


def latencies(points):
    """p50 and p99 of each operation, for each case."""
    cases = points.cases()
    rows = [[f"{op} {size_text(size)}", *(f"{us(points.get(case, op, size))} / {us(points.get(case, op, size, 'p99_ns'))}"
                                          if points.get(case, op, size) else "" for case in cases)]
            for op, size in points.keys("p50_ns")]
    return table(["us, p50 / p99", *cases], rows)


def rates(points):
    cases = points.cases()
    rows = [[f"{op} {size_text(size)}", *(f"{points.get(case, op, size, 'rate') / 1e3:.1f}, {points.get(case, op, size, 'bytes_per_s') / 1e6:.0f}"
                                          if points.get(case, op, size, "rate") else "" for case in cases)] for op, size in points.keys("rate")]
    return table(["k/s, MB/s; 64 in flight", *cases], rows)


def counted(points):
    """Shows that accesses found their pages, or did not."""
    names = ("hits", "misses", "pages_read", "evictions")
    rows = [[case, *(points.get(case, "counters", 0, name) for name in names)]
            for case in points.cases() if points.get(case, "counters", 0, "misses") is not None]
    return table(["server's counters", "hits", "misses", "pages read", "evictions"], rows)


def disk(points):
    ns = points.get("disk", "read", 4096)
    return [] if ns is None else [f"The disk, 4 KiB with O_DIRECT at depth 1: {us(ns)} us, p99 {us(points.get('disk', 'read', 4096, 'p99_ns'))} us."]


def registrations(points):
    rows = [[f"{size_text(size)} {op}", *(" / ".join(f"{points.get(case, op, size, metric) / 1e3:.3f}" for metric in ("register_us", "deregister_us"))
                                          for case in points.cases())] for op, size in points.keys("register_us")]
    return table(["ms, registration / deregistration", *points.cases()], rows)


def control(points):
    def cells(op, size, metric):
        return ["" if points.get(case, op, size, metric) is None else f"{points.get(case, op, size, metric):g}" for case in points.cases()]

    times = [[op, *cells(op, size, "each_us")] for op, size in points.keys("each_us")]
    sizes = [[op, *cells(op, size, "each_bytes")] for op, size in points.keys("each_bytes")]
    return table(["us", *points.cases()], times) + table(["resident bytes", *points.cases()], sizes)


def all_of(points):
    return disk(points) + latencies(points) + rates(points) + counted(points)


TABLES = {
    "buffers": latencies,
    "present": all_of,
    "minor": all_of,
    "major": all_of,
    "others": all_of,
    "slow-others": all_of,
    "store": all_of,
    "registration": registrations,
    "control": control,
}


def present_bars(points, _path):
    bars = []
    for case in points.paged_by_protocol():
        for op, size in points.keys("p50_ns"):
            pairs = points.compared(case, "pin", op, size)
            if op == "READ" and pairs:
                ratio, ns = ratio_of(pairs), difference_of(pairs)
                bars.append(Bar(f"READ {size_text(size)}: {case} above pin", f"{ns:+.0f} ns ({(ratio - 1) * PERCENT:+.1f} %)",
                                f"{(PRESENT_RATIO_MAX - 1) * PERCENT:.0f} % or {PRESENT_NS_MAX} ns", ratio <= PRESENT_RATIO_MAX or ns <= PRESENT_NS_MAX))
        for op, size in points.keys("rate"):
            limit = {"unsignalled WRITEs": UNSIGNALLED_RATIO_MIN, "signalled WRITEs": SIGNALLED_RATIO_MIN}.get(op)
            pairs = points.compared(case, "pin", op, size)
            if pairs and limit and (op.startswith("unsignalled") or size <= SIGNALLED_SMALL_BYTES):
                ratio = ratio_of(pairs)
                bars.append(Bar(f"{op} {size_text(size)}: {case}'s rate", f"{ratio:.3f} of pin's", f"{limit}", ratio >= limit))
    return bars


def minor_bars(points, path):
    """The comparison is with memory that was touched before: pinned memory has no minor faults."""
    if path != "udp":
        return []
    bars = []
    for case in points.paged_by_protocol():
        for op, size in points.keys("p50_ns"):
            pairs = points.compared(case, TOUCHED, op, size)
            if pairs and size <= MINOR_BYTES_MAX:
                ns = difference_of(pairs)
                bars.append(Bar(f"{op} {size_text(size)}: {case} above touched memory", f"{us(ns)} us", f"{us(MINOR_NS_MAX)} us", ns <= MINOR_NS_MAX))
    return bars


def major_bars(points, _path):
    bars = []
    for case in points.paged_by_protocol():
        for op, size in points.keys("p50_ns"):
            if op == "READ" and size <= 4096:
                pairs = list(zip(points.slices(case, op, size), points.disk_of(op, size)))
                above = sorted(left - right for left, right in pairs)
                ns = difference_of(pairs)
                spread = f"{us(ns)} us ({us(above[0])} to {us(above[-1])})"
                bars.append(Bar(f"{op} {size_text(size)}: {case} above the disk", spread, f"{us(MAJOR_NS_MAX)} us", ns <= MAJOR_NS_MAX))
    return bars


def others_bars(points, _path):
    bars = []
    for case in points.paged_by_protocol():
        for op, limit in ((SAME, SAME_RATIO_MAX), (OTHER, OTHER_RATIO_MAX)):
            # A NIC that waits answers a queue pair in order.
            if case != "terrace" or op != SAME:
                ratio = ratio_of(points.compared(case, case, op, 8, ALONE))
                bars.append(Bar(f"{op}: {case}, of alone", f"{ratio:.3f}", f"{limit}", ratio <= limit))
    return bars


BARS = {
    "buffers": lambda _points, _path: [],
    "present": present_bars,
    "minor": minor_bars,
    "major": major_bars,
    "others": others_bars,
    "slow-others": others_bars,
    "store": lambda _points, _path: [],
    "registration": lambda _points, _path: [],
    "control": lambda _points, _path: [],
}
