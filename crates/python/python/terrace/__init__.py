"""Client of Terrace's memory nodes (`terrace serve`): regions that may be larger than the node's memory, over RDMA.

    import terrace

    with terrace.connect("192.0.2.7") as client:
        table = client.open("table")
        table.write(4096, b"hello")
        assert table.read(4096, 5) == b"hello"
        table.commit()

Any object with contiguous bytes is a buffer, such as a numpy array, and no byte is copied on the way to it:

    array = numpy.empty(1 << 20, numpy.uint8)
    table.read_into(0, array)

`begin_...` methods return without waiting, so that many accesses are in flight. `terrace.aio` has the same classes for
asyncio.
"""

from terrace._native import Client, Memory, Operation, Region, connect
from terrace.errors import (
    AccessError,
    ConnectError,
    ConnectionLostError,
    OutOfRangeError,
    RefusedError,
    RegionNotFoundError,
    TerraceError,
)

__all__ = [
    "AccessError",
    "Client",
    "ConnectError",
    "ConnectionLostError",
    "Memory",
    "Operation",
    "OutOfRangeError",
    "RefusedError",
    "Region",
    "RegionNotFoundError",
    "TerraceError",
    "connect",
]
