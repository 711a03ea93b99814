"""Models of an RNIC's translation cache: entries for pages, as regions of memory have them, and entries for ranges, as a FileMR has them
(FileMR, sections 4.2 and 6.3)."""

import fcntl
import os
import struct
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

PAGE_BYTES = 4096
# The caches of the paper: 4096 entries, 4-way associative (section 4.2).
WAYS, SETS = 4, 1024

# ioctl_fiemap(2).
FS_IOC_FIEMAP = 0xC020660B
FIEMAP_FLAG_SYNC = 1
FIEMAP_EXTENT_LAST = 1
HEADER = struct.Struct("=QQLLLL")
EXTENT = struct.Struct("=QQQQQLLLL")
EXTENTS_PER_CALL = 256


@dataclass(frozen=True)
class Access:
    """A READ or WRITE that an IO system call would be: a range of bytes of a file."""

    file: int
    offset: int
    length: int


class Cache:
    """A set-associative cache of translation entries, which replaces the least recently used entry of a set."""

    def __init__(self, sets=SETS, ways=WAYS):
        self.sets = [[] for _ in range(sets)]
        self.ways = ways
        self.hits = self.misses = 0

    def look_up(self, file, index):
        """Looks an entry up, and loads it if it is not there. Entries that follow each other are in sets that follow each other, and
        files begin in sets that a hash of their number chooses."""
        entries = self.sets[(index + file * 0x9E3779B1) % len(self.sets)]
        entry = (file, index)
        if entry in entries:
            entries.remove(entry)
            self.hits += 1
        else:
            self.misses += 1
            if len(entries) == self.ways:
                entries.pop()
        entries.insert(0, entry)


def pages_of(access):
    """The numbers of the pages that an access touches."""
    return range(access.offset // PAGE_BYTES, -(-(access.offset + access.length) // PAGE_BYTES))


class Extents:
    """The translation entries of a FileMR: one for each run of the file that is contiguous on the device."""

    def __init__(self, starts):
        """`starts` are the ascending offsets at which runs begin, the first one at 0."""
        self.starts = starts

    def __len__(self):
        return len(self.starts)

    def touched(self, access):
        """The numbers of the runs that an access touches."""
        first = bisect_right(self.starts, access.offset) - 1
        last = bisect_right(self.starts, access.offset + access.length - 1) - 1
        return range(first, last + 1)


ONE_EXTENT = Extents([0])


def runs_of(extents):
    """The offsets at which runs begin, from (offset, place, length) of each extent. Extents that are contiguous in the file and on the
    device are one run; a hole is a run of its own."""
    starts, next_offset, next_place = [], 0, None
    for offset, place, length in extents:
        if offset > next_offset:
            starts.append(next_offset)
            next_place = None
        if place != next_place or not starts:
            starts.append(offset)
        next_offset, next_place = offset + length, place + length
    return starts or [0]


def extents_of(path):
    """The runs of a file, as its file system has laid it out. ONE_EXTENT where the file system does not say."""
    found, offset = [], 0
    with open(path, "rb") as file:
        while True:
            request = bytearray(HEADER.pack(offset, 2**64 - 1 - offset, FIEMAP_FLAG_SYNC, 0, EXTENTS_PER_CALL, 0))
            request += bytes(EXTENT.size * EXTENTS_PER_CALL)
            try:
                fcntl.ioctl(file, FS_IOC_FIEMAP, request)
            except OSError:
                return ONE_EXTENT
            count = HEADER.unpack_from(request)[3]
            for index in range(count):
                logical, physical, length, _, _, flags, *_ = EXTENT.unpack_from(request, HEADER.size + index * EXTENT.size)
                found.append((logical, physical, length))
                offset = logical + length
            if count == 0 or flags & FIEMAP_EXTENT_LAST:
                return Extents(runs_of(found))


@dataclass
class Replay:
    """What a trace costs with both kinds of entries."""

    accesses: int
    page_lookups: int
    page_misses: int
    range_lookups: int
    range_misses: int

    @property
    def ratio(self):
        """How many times fewer entries are loaded with ranges."""
        return self.page_misses / max(self.range_misses, 1)


def replay(accesses, layout):
    """Replays a trace with an empty cache of each kind. `layout` has the extents of each file."""
    pages, ranges = Cache(), Cache()
    count = Counter()
    for access in accesses:
        if access.length == 0:
            continue
        count["accesses"] += 1
        for page in pages_of(access):
            pages.look_up(access.file, page)
        for number in layout.get(access.file, ONE_EXTENT).touched(access):
            ranges.look_up(access.file, number)
    return Replay(
        accesses=count["accesses"], page_lookups=pages.hits + pages.misses, page_misses=pages.misses,
        range_lookups=ranges.hits + ranges.misses, range_misses=ranges.misses,
    )


def entries_of(paths):
    """How many entries regions over all of these files need: by pages, and by ranges."""
    sizes = [(os.path.getsize(path), path) for path in paths]
    return sum(-(-size // PAGE_BYTES) for size, _ in sizes), sum(len(extents_of(path)) for size, path in sizes if size)
