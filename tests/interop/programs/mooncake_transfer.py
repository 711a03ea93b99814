"""Mooncake's transfer engine: a target with a buffer, and an initiator that reads and writes it by RDMA.

    mooncake_transfer.py target|initiator DIRECTORY ADDRESS

The engines exchange their metadata over TCP, and find each other by files in the directory. The initiator verifies what it
has read, and the target what was written.
"""

import pathlib
import sys
import time

import numpy as np
from mooncake.engine import TransferEngine

LIMIT_S = 40
BYTES = 8 << 20


def pattern(seed):
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, BYTES, dtype=np.uint8)


def publish(path, text):
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def published(path):
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"waited {LIMIT_S} s for {path.name}")
        time.sleep(0.001)
    return path.read_text()


def opened(address, memory):
    engine = TransferEngine()
    status = engine.initialize(address, "P2PHANDSHAKE", "rdma", "terrace0")
    assert status == 0, f"initialize: {status}"
    status = engine.register_memory(memory.ctypes.data, memory.nbytes)
    assert status == 0, f"register_memory: {status}"
    return engine


def target(directory, address):
    memory = pattern(1)
    engine = opened(address, memory)
    publish(directory / "target", f"{address}:{engine.get_rpc_port()} {memory.ctypes.data}")
    published(directory / "written")
    assert np.array_equal(memory, pattern(2)), "the target's memory differs from what was written"


def initiator(directory, address):
    memory = np.zeros(BYTES, dtype=np.uint8)
    engine = opened(address, memory)
    peer, remote = published(directory / "target").split()
    status = engine.transfer_sync_read(peer, memory.ctypes.data, int(remote), BYTES)
    assert status == 0, f"transfer_sync_read: {status}"
    assert np.array_equal(memory, pattern(1)), "the bytes that were read differ"
    memory[:] = pattern(2)
    status = engine.transfer_sync_write(peer, memory.ctypes.data, int(remote), BYTES)
    assert status == 0, f"transfer_sync_write: {status}"
    publish(directory / "written", "yes")


def main():
    {"target": target, "initiator": initiator}[sys.argv[1]](pathlib.Path(sys.argv[2]), sys.argv[3])
    print("verified", BYTES, "bytes")


if __name__ == "__main__":
    main()
