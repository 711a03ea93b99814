"""A memory limit for one process: a control group of version 2 or 1, whichever this machine has."""

import contextlib
import pathlib
import time

MOUNT = pathlib.Path("/sys/fs/cgroup")


class Unavailable(Exception):
    """There is no memory controller that this user may use."""


class MemoryGroup:
    """A control group with a memory limit; a context manager that removes it."""

    def __init__(self, path, limit_file, peak_file, limit_bytes):
        self.path, self.peak_file = path, peak_file
        try:
            (path / limit_file).write_text(str(limit_bytes))
        except OSError:
            path.rmdir()
            raise

    def argv(self, command):
        """`command` started inside the group: a shell joins it, then becomes the command."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

    def peak_bytes(self):
        """The group's peak memory including page cache; None if this kernel does not record it."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.path / self.peak_file).read_text())
        return None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # The kernel may release an ended process a little later.
        for _ in range(50):
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)


def memory_group(name, limit_bytes):
    """A new group with a limit. Raises `Unavailable` with one line that lists the failed attempts."""
    tried = []
    for make in (_version_2, _version_1):
        try:
            return make(name, limit_bytes)
        except (OSError, Unavailable) as error:
            tried.append(f"{make.__doc__}: {error}")
    raise Unavailable(f"cannot limit memory here ({'; '.join(tried)}): needs root and a cgroup memory controller")


def _own_path(controller):
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def _version_2(name, limit_bytes):
    """cgroup v2"""
    if "memory" not in _words(MOUNT / "cgroup.controllers"):
        raise Unavailable("no memory controller")
    # A group with processes cannot delegate controllers to children: use the nearest ancestor that already does.
    parent = MOUNT / _own_path("")
    while parent != MOUNT and "memory" not in _words(parent / "cgroup.subtree_control"):
        parent = parent.parent
    if "memory" not in _words(parent / "cgroup.subtree_control"):
        (parent / "cgroup.subtree_control").write_text("+memory")
    path = parent / name
    path.mkdir()
    return MemoryGroup(path, "memory.max", "memory.peak", limit_bytes)


def _version_1(name, limit_bytes):
    """cgroup v1"""
    mount = MOUNT / "memory"
    if not (mount / "memory.limit_in_bytes").exists():
        raise Unavailable("no memory controller")
    own = mount / _own_path("memory")
    path = (own if own.is_dir() else mount) / name
    path.mkdir()
    return MemoryGroup(path, "memory.limit_in_bytes", "memory.max_usage_in_bytes", limit_bytes)


def _words(path):
    with contextlib.suppress(OSError):
        return path.read_text().split()
    return []
