"""A file system for `fsspec` over exported directories (`terrace export`): `terrace://HOST[:PORT]/path`.

    import fsspec

    with fsspec.open("terrace://192.0.2.7/results/table.csv") as file:
        first = file.readline()

    files = fsspec.filesystem("terrace", host="192.0.2.7")
    files.pipe("/results/done", b"yes")

pandas, pyarrow, dask and other programs that take fsspec's URLs take these. `pip install terrace-rdma[fsspec]` brings fsspec.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import threading
import urllib.parse
import uuid
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from fsspec.spec import AbstractFileSystem
from fsspec.utils import stringify_path

import terrace

if TYPE_CHECKING:
    from terrace import Export, ExportFile
    from terrace._native import Buffer

__all__ = ["ReadFile", "TerraceFileSystem", "UpdateFile", "WriteFile"]

SCHEME = "terrace://"
PORT = 7447
BUFFER_BYTES = 64 << 10
COPY_BYTES = 4 << 20
# Beyond any file.
LENGTH_MAX = (1 << 63) - 1


class _RawFile(io.RawIOBase):
    """An open file with a position, without a buffer."""

    def __init__(self, file: ExportFile, name: str, mode: str) -> None:
        self.file = file
        # Python's buffers of files have these attributes from here.
        self.name = name
        self.mode = mode
        self._position = self.size() if "a" in mode else 0

    def size(self) -> int:
        return int(self.file.stat()["size"])

    def readable(self) -> bool:
        return "r" in self.mode or "+" in self.mode

    def writable(self) -> bool:
        return "r" not in self.mode or "+" in self.mode

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"invalid whence: {whence}")
        position = offset
        if whence == io.SEEK_CUR:
            position += self._position
        elif whence == io.SEEK_END:
            position += self.size()
        if position < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        if not self.readable():
            raise io.UnsupportedOperation("the file is not open for reading")
        count = self.file.read_into_at(self._position, buffer)
        self._position += count
        return count

    def readall(self) -> bytes:
        if not self.readable():
            raise io.UnsupportedOperation("the file is not open for reading")
        data = self.file.read_at(self._position, LENGTH_MAX)
        self._position += len(data)
        return data

    def write(self, buffer: Any) -> int:
        if not self.writable():
            raise io.UnsupportedOperation("the file is not open for writing")
        count = memoryview(buffer).nbytes
        if "a" in self.mode:
            self._position = self.file.append(buffer)
        else:
            self._position += self.file.write_at(self._position, buffer)
        return count

    def truncate(self, size: int | None = None) -> int:
        if not self.writable():
            raise io.UnsupportedOperation("the file is not open for writing")
        length = self._position if size is None else size
        self.file.truncate(length)
        return length

    def close(self) -> None:
        if not self.closed:
            try:
                super().close()
            finally:
                self.file.close()


class _Buffered:
    """What open files of all directions have besides Python's methods."""

    raw: _RawFile

    def __init__(self, fs: TerraceFileSystem, path: str, raw: _RawFile, buffer_bytes: int, temporary: str | None) -> None:
        super().__init__(raw, buffer_bytes)  # type: ignore[call-arg]
        self.fs = fs
        self.path = path
        # Where a file of a transaction is until its end.
        self._temporary = temporary

    @property
    def size(self) -> int:
        """The file's length in bytes, with those that are still buffered."""
        if self.raw.writable():
            self.flush()  # type: ignore[attr-defined]
        return self.raw.size()

    def info(self) -> dict[str, Any]:
        """The file's attributes, as `TerraceFileSystem.info` has them."""
        return {**self.raw.file.stat(), "name": self.path}

    def sync(self) -> None:
        """Makes all that was written durable: it survives a power failure."""
        self.flush()  # type: ignore[attr-defined]
        self.raw.file.commit()

    def commit(self) -> None:
        """Gives a file of a transaction its name. fsspec calls this at the end of a transaction."""
        if self._temporary is not None:
            self.fs.client.rename(self._temporary, self.path, exclusive="x" in self.raw.mode)
            self._temporary = None

    def discard(self) -> None:
        """Removes a file of a transaction. fsspec calls this when a transaction fails."""
        if self._temporary is not None:
            self.fs.client.unlink(self._temporary)
            self._temporary = None


class ReadFile(_Buffered, io.BufferedReader):  # type: ignore[misc]
    """A file that is open for reading."""


class WriteFile(_Buffered, io.BufferedWriter):  # type: ignore[misc]
    """A file that is open for writing or appending."""


class UpdateFile(_Buffered, io.BufferedRandom):  # type: ignore[misc]
    """A file that is open for both."""


class TerraceFileSystem(AbstractFileSystem):
    """The files of an exported directory.

    `host` and `port` are the server's. `local` is this end's address. `transport` is the path to a server on the same host:
    "auto", "udp" or "local". Each request to the server ends within `timeout` seconds. Nothing is cached. The connection is
    made at the first use, and again in a process that is forked.
    """

    protocol = "terrace"
    root_marker = "/"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = PORT,
        local: str | None = None,
        transport: str = "auto",
        timeout: float = 30.0,
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        self.host = host
        self.port = port
        self._connect: dict[str, Any] = {"port": port, "local": local, "path": transport, "timeout": timeout}
        self._client: Export | None = None
        self._client_pid = 0
        self._lock = threading.Lock()

    @property
    def client(self) -> Export:
        """The connection of this process."""
        if self._client_pid != os.getpid():
            # A fork may have copied the lock while another thread held it.
            self._lock = threading.Lock()
            with self._lock:
                self._client = None
                self._client_pid = os.getpid()
        with self._lock:
            if self._client is None:
                self._client = terrace.connect_export(self.host, **self._connect)
            return self._client

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        path = stringify_path(path)
        if path.startswith(SCHEME):
            path = path[len(SCHEME) :].partition("/")[2]
        return "/" + path.strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        if not path.startswith(SCHEME):
            return {}
        server = urllib.parse.urlsplit("//" + path[len(SCHEME) :].partition("/")[0])
        found = {"host": server.hostname, "port": server.port}
        return {name: value for name, value in found.items() if value is not None}

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{host}:{self.port}{self._strip_protocol(name)}"

    @property
    def fsid(self) -> str:
        """What identifies the export among file systems."""
        return f"terrace_{self.host}_{self.port}"

    # Names and attributes.

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        """A file's attributes. Symbolic links are followed."""
        return self.client.stat(self._strip_protocol(path))

    def ls(self, path: str, detail: bool = True, **_options: Any) -> list[Any]:
        """The files in a directory, or the one file of the path.

        A symbolic link to a file has the file's attributes. One to a directory has the type "link", so that no walk follows it.
        """
        path = self._strip_protocol(path)
        try:
            entries = self.client.list(path)
        except NotADirectoryError:
            entries = [self.info(path)]
        else:
            for entry in entries:
                entry["name"] = _join(path, entry["name"])
        if not detail:
            return sorted(entry["name"] for entry in entries)
        return sorted(map(self._with_target, entries), key=lambda entry: entry["name"])

    def _with_target(self, entry: dict[str, Any]) -> dict[str, Any]:
        if entry["type"] != "link":
            return entry
        try:
            target = self.info(entry["name"])
        except OSError:
            # It leads to nothing, or out of the exported directory.
            return {**entry, "islink": True}
        return {**(entry if target["type"] == "directory" else target), "islink": True}

    def lexists(self, path: str, **_options: Any) -> bool:
        """Whether there is a file of that name, or a symbolic link."""
        try:
            self.client.stat(self._strip_protocol(path), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def modified(self, path: str) -> datetime:
        """When the file's contents were last changed, by the server's clock."""
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=timezone.utc)

    def mkdir(self, path: str, create_parents: bool = True, **_options: Any) -> None:
        """Makes a directory."""
        path = self._strip_protocol(path)
        if create_parents:
            self.makedirs(self._parent(path), exist_ok=True)
        self.makedirs(path) if path == "/" else self.client.mkdir(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a directory and those above it."""
        path = self._strip_protocol(path)
        try:
            if path == "/":
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            try:
                self.client.mkdir(path)
            except FileNotFoundError:
                self.makedirs(self._parent(path), exist_ok=True)
                self.client.mkdir(path)
        except FileExistsError:
            if not exist_ok or not self.isdir(path):
                raise

    def rmdir(self, path: str) -> None:
        """Removes an empty directory."""
        self.client.rmdir(self._strip_protocol(path))

    def rm_file(self, path: str) -> None:
        """Removes a file. A symbolic link is not followed."""
        self.client.unlink(self._strip_protocol(path))

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Removes files, and with `recursive` directories with all that is in them. Symbolic links are not followed."""
        if maxdepth is not None:
            raise ValueError("rm has no maximum of the depth: use find and rm_file")
        for given in path if isinstance(path, list) else [path]:
            given = self._strip_protocol(given)
            is_pattern = not self.lexists(given) and any(sign in given for sign in "*?[")
            for found in self.glob(given) if is_pattern else [given]:
                self._remove(found, recursive)

    def _remove(self, path: str, recursive: bool) -> None:
        if not recursive or self.client.stat(path, follow_symlinks=False)["type"] != "directory":
            self.client.unlink(path)
            return
        directories = [path]
        for directory in directories:
            for entry in self.client.list(directory):
                name = _join(directory, entry["name"])
                directories.append(name) if entry["type"] == "directory" else self.client.unlink(name)
        for directory in reversed(directories):
            self.client.rmdir(directory)

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **_options: Any) -> None:
        """Renames a file or directory. A file of the new name is replaced."""
        self.client.rename(self._strip_protocol(path1), self._strip_protocol(path2))

    def touch(self, path: str, truncate: bool = True, **_options: Any) -> None:
        """Makes an empty file; or, without `truncate`, sets the times of a file to now."""
        path = self._strip_protocol(path)
        self.client.open(path, "w" if truncate else "a").close()
        self.client.touch(path)

    # Contents.

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | str | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        permissions: int = 0o644,
        **_options: Any,
    ) -> ReadFile | WriteFile | UpdateFile:
        """Opens a file. `block_size` is the length of its buffer in bytes; `permissions` are a new file's."""
        kind = mode.replace("b", "")
        temporary = None
        if not autocommit and kind != "r":
            if kind[0] not in "wx":
                raise ValueError(f"a transaction has new files only, not mode {mode!r}")
            parent, _, name = path.rpartition("/")
            temporary = f"{parent}/.{name[:200]}.{uuid.uuid4().hex}"
        raw = _RawFile(self.client.open(temporary or path, kind, permissions=permissions), path, mode)
        buffered = UpdateFile if "+" in kind else ReadFile if kind == "r" else WriteFile
        buffer_bytes = block_size if isinstance(block_size, int) and block_size > 0 else BUFFER_BYTES
        return buffered(self, path, raw, buffer_bytes, temporary)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_options: Any) -> bytes:
        """A file's bytes, or a range of them. Negative bounds count from the end."""
        with self.client.open(self._strip_protocol(path)) as file:
            size = file.stat()["size"] if min(start or 0, end or 0) < 0 else 0
            first = max(0, start + size if start and start < 0 else start or 0)
            last = LENGTH_MAX if end is None else end + size if end < 0 else end
            return file.read_at(first, max(0, last - first))

    def pipe_file(self, path: str, value: Buffer, mode: str = "overwrite", **_options: Any) -> None:
        """Makes a file of these bytes. `mode` "create" does not replace one."""
        with self.client.open(self._strip_protocol(path), "x" if mode == "create" else "w") as file:
            file.write_at(0, value)

    def cp_file(self, path1: str, path2: str, **_options: Any) -> None:
        """Copies a file, by way of this client. Of a directory only the directory itself is made. `shutil.SameFileError` if
        both names are of one file."""
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        if self._is_same_file(path1, path2):
            raise shutil.SameFileError(f"{path1!r} and {path2!r} are the same file")
        with self.open(path1) as source, self.open(path2, "wb") as target:
            shutil.copyfileobj(source, target, COPY_BYTES)

    def _is_same_file(self, path1: str, path2: str) -> bool:
        """Whether both names are of one file, by way of links, too. An export is of one file system."""
        try:
            found = [self.client.stat(self._strip_protocol(path))["ino"] for path in (path1, path2)]
        except FileNotFoundError:
            return False
        return found[0] == found[1]


def _join(directory: str, name: str) -> str:
    return f"{directory.rstrip('/')}/{name}"
