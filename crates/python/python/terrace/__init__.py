"""Client of Terrace's memory nodes (`terrace serve`): regions that may be larger than the node's memory, over RDMA; and of
exported directories (`terrace export`).

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
asyncio. `connect_export` connects to an exported directory, and `terrace.fsspec` makes a file system of it for `fsspec`.
"""

from terrace._native import Client, Export, ExportFile, Memory, Operation, Region, connect, connect_export
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
    "Export",
    "ExportFile",
    "Memory",
    "Operation",
    "OutOfRangeError",
    "RefusedError",
    "Region",
    "RegionNotFoundError",
    "TerraceError",
    "connect",
    "connect_export",
]
