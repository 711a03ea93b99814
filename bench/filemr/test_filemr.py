"""The traces and the caches of `make bench-filemr`."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import latency  # noqa: E402
import trace  # noqa: E402
import translation  # noqa: E402
from translation import Access  # noqa: E402

STRACE = """\
10 openat(AT_FDCWD</w>, "log", O_WRONLY|O_CREAT|O_APPEND, 0644) = 3</d/log>
10 write(3</d/log>, ""..., 100) = 100
11 openat(AT_FDCWD</w>, "/d/db", O_RDWR|O_CREAT, 0644) = 4</d/db>
11 pwrite64(4</d/db>, ""..., 4096, 8192 <unfinished ...>
10 write(3</d/log>, ""..., 50) = 50
11 <... pwrite64 resumed>) = 4096
10 lseek(4</d/db>, 4096, SEEK_SET) = 4096
10 read(4</d/db>,  <unfinished ...>
11 pread64(4</d/db>, ""..., 16, 0) = 16
10 <... read resumed>""..., 8192) = 8192
10 read(4</d/db>, "", 8192) = 0
10 read(4</d/db>, 0x7ffc, 8192) = -1 EIO (Input/output error)
10 rename("/d/log", "/d/old") = 0
10 openat(AT_FDCWD</d>, "log", O_WRONLY|O_CREAT|O_TRUNC, 0644) = 5</d/log>
10 write(5</d/log>, ""..., 7) = 7
10 write(1</dev/pts/0>, ""..., 7) = 7
10 +++ exited with 0 +++
"""


class Traces(unittest.TestCase):
    def test_positions_appends_renames_and_interrupted_calls(self):
        accesses, paths = trace.read(STRACE.splitlines(), "/d")
        log, database, new = 0, 1, 2
        self.assertEqual(paths, {log: "/d/old", database: "/d/db", new: "/d/log"})
        self.assertEqual(accesses, [
            Access(log, 0, 100), Access(log, 100, 50), Access(database, 8192, 4096), Access(database, 0, 16), Access(database, 4096, 8192),
            Access(new, 0, 7),
        ])


class Caches(unittest.TestCase):
    def test_the_least_recently_used_entry_of_a_set_is_replaced(self):
        cache = translation.Cache(sets=2, ways=2)
        for index in (0, 2, 0, 4, 0, 2, 1):
            cache.look_up(0, index)
        self.assertEqual((cache.hits, cache.misses), (2, 5), "4 replaces 2, and 2 replaces 4")

    def test_runs_are_joined_where_file_and_device_are_contiguous(self):
        extents = [(0, 1000, 4096), (4096, 5096, 4096), (8192, 90_000, 4096), (20_480, 94_096, 4096)]
        self.assertEqual(translation.runs_of(extents), [0, 8192, 12_288, 20_480], "the third run is a hole")
        self.assertEqual(translation.runs_of([]), [0])
        self.assertEqual(translation.runs_of([(4096, 0, 4096)]), [0, 4096], "a hole at the start")

    def test_an_access_looks_up_each_page_and_each_run_that_it_touches(self):
        layout = {7: translation.Extents([0, 8192])}
        found = translation.replay([Access(7, 0, 16_384), Access(7, 8191, 2), Access(8, 5, 1), Access(7, 0, 0)], layout)
        self.assertEqual((found.accesses, found.page_lookups, found.page_misses), (3, 7, 5))
        self.assertEqual((found.range_lookups, found.range_misses), (5, 3))

    def test_the_layout_of_a_file_is_read_from_its_file_system(self):
        with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
            file.write(b"x" * 4096)
            file.seek(1 << 20)
            file.write(b"x" * 4096)
            file.flush()
            extents = translation.extents_of(file.name)
            self.assertEqual(extents.starts[0], 0)
            self.assertIn(extents.starts, ([0], [0, 4096, 1 << 20]), "one extent where the file system does not say")


class Latency(unittest.TestCase):
    def test_the_bar_is_the_ratio_at_64_bytes(self):
        def appends(within_us):
            row = {latency.LOCAL_LOG: {"us": 100.0}, latency.REMOTE_LOG: {"us": 100.0}}
            return {64: {**row, latency.REMOTE_LOG: {"us": within_us}}, 256: row}

        for within_us, is_met, words in ((125.0, True, ("1.25", "limit 1.53 (met), target 1.25 (met)")),
                                         (140.0, True, ("1.40", "limit 1.53 (met), target 1.25 (missed)")),
                                         (154.0, False, ("1.54", "limit 1.53 (missed), target 1.25 (missed)"))):
            page, found = latency.tables({}, appends(within_us))
            self.assertEqual(found, is_met)
            for word in words:
                self.assertIn(word, page)


if __name__ == "__main__":
    unittest.main()
