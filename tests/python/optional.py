"""Modules that a test may do without."""

import importlib.metadata

try:
    import fsspec
except ImportError:
    fsspec = None

# crates/python/pyproject.toml has it, too.
ENTRY = ("terrace", "terrace.fsspec:TerraceFileSystem")


def register():
    """Does what the wheel's entry point does, if it is not installed."""
    try:
        importlib.metadata.distribution("terrace-rdma")
    except importlib.metadata.PackageNotFoundError:
        fsspec.register_implementation(ENTRY[0], ENTRY[1].replace(":", "."), clobber=True)


if fsspec is not None:
    register()
