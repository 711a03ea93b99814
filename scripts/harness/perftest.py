"""Parses the result table of perftest's tools."""

import re

# "#bytes #iterations    t_min[usec]    99% percentile[usec]": titles may contain single spaces, and units are in
# brackets.
TITLE = re.compile(r"#bytes|#iterations|[\w.%]+(?: \w+)*\[[^\]]*\]")


def parse_table(text):
    """The rows as dictionaries from column title to number; empty without a table."""
    titles, rows = [], []
    for line in text.splitlines():
        if line.lstrip().startswith("#bytes"):
            titles = TITLE.findall(line)
            continue
        cells = line.split()
        if titles and cells and cells[0].isdigit():
            numbers = [_number(cell) for cell in cells]
            if None not in numbers and len(numbers) >= min(len(titles), 3):
                rows.append(dict(zip(titles, numbers)))
    return rows


def _number(cell):
    try:
        return float(cell)
    except ValueError:
        return None


def typical_us(row):
    """Typical latency in microseconds."""
    return row["t_typical[usec]"]


def average_mib_s(row):
    """Average bandwidth; perftest's "MB" is 2^20 bytes."""
    return row["BW average[MB/sec]"]


def messages_per_s(row):
    """Message rate."""
    return row["MsgRate[Mpps]"] * 1e6
