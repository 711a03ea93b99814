"""The client for asyncio: the classes of `terrace`, whose methods are awaited.

    import asyncio
    import terrace.aio

    async def main():
        async with await terrace.aio.connect("192.0.2.7") as client:
            table = await client.open("table")
            pages = await asyncio.gather(*(table.read(page * 4096, 4096) for page in range(100)))

An access begins when its method is called. An access whose task is cancelled goes on, and its buffer stays in use until
the access has ended.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Awaitable, Callable, Iterable

import terrace

if TYPE_CHECKING:
    from terrace import Memory, Operation
    from terrace._native import Buffer

__all__ = ["Client", "Region", "connect"]


def _settle(future: asyncio.Future[Any], operation: Operation) -> None:
    # The task may have been cancelled.
    if future.done():
        return
    try:
        future.set_result(operation.wait())
    except BaseException as error:
        future.set_exception(error)


def _notify(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], operation: Operation) -> None:
    try:
        loop.call_soon_threadsafe(_settle, future, operation)
    except RuntimeError:
        # The loop is closed: nobody waits any more.
        pass


def _future(operation: Operation) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    if operation.done():
        _settle(future, operation)
    else:
        operation.add_done_callback(functools.partial(_notify, loop, future, operation))
    return future


async def _in_thread(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    call = functools.partial(function, *arguments, **keywords)
    return await asyncio.get_running_loop().run_in_executor(None, call)


async def connect(
    server: str, *, instance: int = 0, local: str | None = None, depth: int = 256, path: str = "auto"
) -> Client:
    """Connects to a memory node; see `terrace.connect`."""
    return Client(await _in_thread(terrace.connect, server, instance=instance, local=local, depth=depth, path=path))


class Client:
    """A connection to a memory node; see `terrace.Client`."""

    def __init__(self, client: terrace.Client) -> None:
        self._client = client

    @property
    def server(self) -> str:
        """The server's address."""
        return self._client.server

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._client.closed

    async def open(self, name: str) -> Region:
        """Opens a region of the server by its name."""
        return Region(await _in_thread(self._client.open, name))

    def register(self, buffer: Buffer) -> Memory:
        """Registers the bytes of an object for many accesses; see `terrace.Client.register`."""
        return self._client.register(buffer)

    async def close(self) -> None:
        """Closes the connection. Accesses that have not ended fail."""
        await _in_thread(self._client.close)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<terrace.aio.Client of {self.server}{', closed' if self.closed else ''}>"


class Region:
    """A region of a memory node; see `terrace.Region`."""

    def __init__(self, region: terrace.Region) -> None:
        self._region = region

    @property
    def name(self) -> str:
        """The region's name."""
        return self._region.name

    def __len__(self) -> int:
        return len(self._region)

    def read(self, offset: int, length: int) -> Awaitable[bytes]:
        """Reads `length` bytes."""
        return _future(self._region.begin_read(offset, length))

    def read_into(self, offset: int, buffer: Buffer | Memory) -> Awaitable[int]:
        """Reads as many bytes as the buffer has, into the buffer. Returns their number."""
        return _future(self._region.begin_read_into(offset, buffer))

    def read_many(self, parts: Iterable[tuple[int, Buffer | Memory]]) -> Awaitable[int]:
        """Reads several parts, each into its buffer: `[(offset, buffer), ...]`. Returns the number of bytes."""
        return _future(self._region.begin_read_many(list(parts)))

    def write(self, offset: int, buffer: Buffer | Memory) -> Awaitable[int]:
        """Writes the bytes of the buffer. Returns their number."""
        return _future(self._region.begin_write(offset, buffer))

    def write_many(self, parts: Iterable[tuple[int, Buffer | Memory]]) -> Awaitable[int]:
        """Writes several parts, each from its buffer: `[(offset, buffer), ...]`. Returns the number of bytes."""
        return _future(self._region.begin_write_many(list(parts)))

    def commit(self, offset: int = 0, length: int | None = None) -> Awaitable[None]:
        """Makes a range durable, by default the whole region; see `terrace.Region.commit`."""
        return _future(self._region.begin_commit(offset, length))

    def __repr__(self) -> str:
        return f"<terrace.aio.Region {self.name!r} of {len(self)} bytes>"
