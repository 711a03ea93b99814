"""Huge pages of 2 MiB, of which most machines have none set aside."""

import contextlib
import fcntl
import pathlib

DIRECTORY = pathlib.Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


@contextlib.contextmanager
def set_aside(count):
    """Reserves `count` huge pages while the context is open; yields whether they are there. That takes a privilege, and
    may fail for fragmented memory."""
    if _spare() >= count:
        yield True
        return
    with contextlib.ExitStack() as on_leaving:
        with contextlib.suppress(OSError):
            # The lock is held from the change of the number until it is restored.
            number = on_leaving.enter_context(open(DIRECTORY / "nr_hugepages"))
            fcntl.flock(number, fcntl.LOCK_EX)
            before, missing = _number("nr_hugepages"), count - _spare()
            _set(before + missing)
            on_leaving.callback(_set, before)
        yield _spare() >= count


def _set(count):
    # Without the privilege the number was never changed.
    with contextlib.suppress(OSError):
        (DIRECTORY / "nr_hugepages").write_text(str(count))


def _number(name):
    return int((DIRECTORY / name).read_text())


def _spare():
    """How many huge pages are free and not reserved."""
    with contextlib.suppress(OSError):
        return _number("free_hugepages") - _number("resv_hugepages")
    return 0
