"""NIXL's agents transfer memory through UCX: a target with a buffer, and an initiator that READs and WRITEs it.

    nixl_transfer.py target|initiator DIRECTORY

The agents exchange their metadata through files in the directory. The initiator verifies what it has read, and the target
what was written.
"""

import pathlib
import sys
import time

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

LIMIT_S = 40
BYTES = 8 << 20


def pattern(seed):
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, BYTES, dtype=np.uint8)


def publish(path, data):
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.rename(path)


def wait_for(what, condition):
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            sys.exit(f"waited {LIMIT_S} s for {what}")
        time.sleep(0.001)
    return found


def published(path):
    return wait_for(path.name, lambda: path.exists() and path.read_bytes())


def described(agent, array):
    """The array, registered, and its descriptors for transfers."""
    region = [(array.ctypes.data, array.nbytes, 0, "")]
    agent.register_memory(agent.get_reg_descs(region, "DRAM"))
    return agent.get_xfer_descs([(array.ctypes.data, array.nbytes, 0)], "DRAM")


def target(directory):
    agent = nixl_agent("target", nixl_agent_config(backends=["UCX"]))
    memory = pattern(1)
    descriptors = described(agent, memory)
    publish(directory / "descriptors", agent.get_serialized_descs(descriptors))
    publish(directory / "metadata", agent.get_agent_metadata())
    notices = wait_for("the initiator's notice", agent.get_new_notifs)
    assert notices == {"initiator": [b"written"]}, notices
    assert np.array_equal(memory, pattern(2)), "the target's memory differs from what was written"


def initiator(directory):
    agent = nixl_agent("initiator", nixl_agent_config(backends=["UCX"]))
    memory = np.zeros(BYTES, dtype=np.uint8)
    local = described(agent, memory)
    peer = agent.add_remote_agent(published(directory / "metadata"))
    remote = agent.deserialize_descs(published(directory / "descriptors"))

    def transfer(operation, notice):
        handle = agent.initialize_xfer(operation, local, remote, peer, notice)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        agent.release_xfer_handle(handle)

    transfer("READ", b"")
    assert np.array_equal(memory, pattern(1)), "the bytes that were read differ"
    memory[:] = pattern(2)
    transfer("WRITE", b"written")


def main():
    {"target": target, "initiator": initiator}[sys.argv[1]](pathlib.Path(sys.argv[2]))
    print("verified", BYTES, "bytes")


if __name__ == "__main__":
    main()
