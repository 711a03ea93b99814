"""Huge pages of 2 MiB, of which most machines have none set aside."""

import contextlib
import fcntl
import pathlib

DIRECTORY = pathlib.Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


@contextlib.contextmanager
def set_aside(count):
    """Has so many to spare for a while, if that can be had: not everybody may do that, and memory may be in pieces. Says whether they are."""
    if _spare() >= count:
        yield True
        return
    with contextlib.ExitStack() as on_leaving:
        with contextlib.suppress(OSError):
            # Who changes how many there are has that locked until they are as they were.
            number = on_leaving.enter_context(open(DIRECTORY / "nr_hugepages"))
            fcntl.flock(number, fcntl.LOCK_EX)
            before, missing = _number("nr_hugepages"), count - _spare()
            _set(before + missing)
            on_leaving.callback(_set, before)
        yield _spare() >= count


def _set(count):
    # Who may not do that has not done it before either.
    with contextlib.suppress(OSError):
        (DIRECTORY / "nr_hugepages").write_text(str(count))


def _number(name):
    return int((DIRECTORY / name).read_text())


def _spare():
    """How many are neither used nor promised to somebody."""
    with contextlib.suppress(OSError):
        return _number("free_hugepages") - _number("resv_hugepages")
    return 0
