"""Reservation of huge pages of 2 MiB. Most machines have none reserved."""

import contextlib
import fcntl
import pathlib

DIRECTORY = pathlib.Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


@contextlib.contextmanager
def reserve(count):
    """Reserves `count` huge pages while the context is open. Yields whether they are available: the reservation needs a
    privilege, and may fail if memory is fragmented."""
    if _available() >= count:
        yield True
        return
    with contextlib.ExitStack() as on_leaving:
        with contextlib.suppress(OSError):
            # The lock is held from the change of the number until it is restored.
            number = on_leaving.enter_context(open(DIRECTORY / "nr_hugepages"))
            fcntl.flock(number, fcntl.LOCK_EX)
            before, missing = _number("nr_hugepages"), count - _available()
            _set(before + missing)
            on_leaving.callback(_set, before)
        yield _available() >= count


def _set(count):
    # Without the privilege the number was not changed.
    with contextlib.suppress(OSError):
        (DIRECTORY / "nr_hugepages").write_text(str(count))


def _number(name):
    return int((DIRECTORY / name).read_text())


def _available():
    """The number of huge pages that are free and not reserved."""
    with contextlib.suppress(OSError):
        return _number("free_hugepages") - _number("resv_hugepages")
    return 0
