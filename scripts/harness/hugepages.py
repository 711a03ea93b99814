"""Huge pages of 2 MiB, of which most machines have none set aside."""

import contextlib
import pathlib

DIRECTORY = pathlib.Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


@contextlib.contextmanager
def set_aside(count):
    """Has so many free for a while, if that can be had: not everybody may do that, and memory may be in pieces. Says whether they are."""
    before = None
    try:
        with contextlib.suppress(OSError, ValueError):
            missing = count - _number("free_hugepages")
            if missing > 0:
                all_of_them = _number("nr_hugepages")
                (DIRECTORY / "nr_hugepages").write_text(str(all_of_them + missing))
                before = all_of_them
        yield _are_free(count)
    finally:
        if before is not None:
            with contextlib.suppress(OSError):
                (DIRECTORY / "nr_hugepages").write_text(str(before))


def _number(name):
    return int((DIRECTORY / name).read_text())


def _are_free(count):
    with contextlib.suppress(OSError, ValueError):
        return _number("free_hugepages") >= count
    return count == 0
