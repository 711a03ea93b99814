"""The exceptions of `terrace`. Their messages say what to do."""


class TerraceError(Exception):
    """Base of the exceptions of this module."""


class ConnectError(TerraceError, ConnectionError):
    """No connection: no memory node answers, or this end has no usable address."""


class ConnectionLostError(TerraceError, ConnectionError):
    """The connection has ended: connect again. A write that raises this may or may not have taken effect."""


class RefusedError(TerraceError, PermissionError):
    """The server refuses the client or its request, for example by a quota."""


class RegionNotFoundError(TerraceError, LookupError):
    """The server has no region of that name."""


class OutOfRangeError(TerraceError, IndexError):
    """An access beyond the end of the region."""


class AccessError(TerraceError, OSError):
    """The server or this end could not carry an access out. The connection has ended: connect again."""
