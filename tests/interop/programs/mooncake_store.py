"""Mooncake's store: one process contributes memory, another one puts objects there by RDMA WRITE and gets them by RDMA READ.

    mooncake_store.py segment|client DIRECTORY ADDRESS MASTER

MASTER is the address and port of a `mooncake_master`. The client verifies the objects that it gets, and prints the rates.
"""

import pathlib
import sys
import time

import numpy as np
from mooncake.store import MooncakeDistributedStore

LIMIT_S = 40
SEGMENT_BYTES = 256 << 20
# Objects are copied through it.
LOCAL_BUFFER_BYTES = 64 << 20
OBJECTS, OBJECT_BYTES = 16, 4 << 20


def opened(address, master, segment_bytes):
    store = MooncakeDistributedStore()
    status = store.setup(address, "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "rdma", "terrace0", master)
    assert status == 0, f"setup: {status}"
    return store


def wait_for(path):
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"waited {LIMIT_S} s for {path.name}")
        time.sleep(0.01)


def segment(directory, address, master):
    store = opened(address, master, SEGMENT_BYTES)
    (directory / "segment").touch()
    wait_for(directory / "done")
    store.close()


def client(directory, address, master):
    wait_for(directory / "segment")
    store = opened(address, master, 0)
    objects = {f"object-{seed}": np.random.Generator(np.random.PCG64(seed)).bytes(OBJECT_BYTES) for seed in range(OBJECTS)}
    started = time.perf_counter()
    for key, data in objects.items():
        status = store.put(key, data)
        assert status == 0, f"put: {status}"
    put = time.perf_counter()
    got = {key: store.get(key) for key in objects}
    done = time.perf_counter()
    assert got == objects, "an object differs from what was put"
    total = OBJECTS * OBJECT_BYTES / 1e9
    print(f"put {total / (put - started):.2f} GB/s, get {total / (done - put):.2f} GB/s")
    store.close()
    (directory / "done").touch()


def main():
    role, directory, *addresses = sys.argv[1:]
    {"segment": segment, "client": client}[role](pathlib.Path(directory), *addresses)
    print("verified", flush=True)


if __name__ == "__main__":
    main()
