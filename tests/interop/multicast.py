"""Multicast by rdma_cm: Debian's `mckey`, whose members join a group and count the sender's messages."""

import ipaddress
import pathlib
import time

from cases import last_output
from harness import procs

# Two hosts, the first of which has two members.
ADDRESSES = ("127.0.0.54", "127.0.0.54", "127.0.0.55")
SENDER = "127.0.0.56"
ROCE_PORT = 4791
MESSAGES = 50
LIMIT_S = 30


def member_count(group):
    """Sockets of this network namespace that are bound to the group."""
    # The kernel prints addresses as numbers of its byte order.
    number = int.from_bytes(ipaddress.ip_address(group).packed, "little")
    local = f"{number:08X}:{ROCE_PORT:04X}"
    return sum(line.split()[1] == local for line in pathlib.Path("/proc/net/udp").read_text().splitlines()[1:])


def mckey(group, port_space, *sender_options):
    """Every member, at whatever address, receives everything that the sender sends."""

    def case(log_dir):
        common = ["mckey", "-m", group, "-p", port_space, "-C", str(MESSAGES), "-S", "1000"]

        def start(address, name, *options):
            command = procs.under_terrace([*common, "-b", address, *options], addr=address)
            return procs.Program(command, log_dir, name)

        programs = {f"member-{index}": start(address, f"member-{index}") for index, address in enumerate(ADDRESSES)}
        try:
            deadline = time.monotonic() + LIMIT_S
            while member_count(group) < len(ADDRESSES):
                ended = next((member for member in programs.values() if member.wait(0.02) is not None), None)
                if ended is not None:
                    return f"a member ended before it had joined: {last_output(ended.outcome())}"
                if time.monotonic() > deadline:
                    return f"{member_count(group)} of {len(ADDRESSES)} members joined"
            programs["sender"] = start(SENDER, "sender", "-s", *sender_options)
            for name, program in programs.items():
                status = program.wait(deadline - time.monotonic())
                if status != 0:
                    return f"the {name} {'is late' if status is None else 'failed'}: {last_output(program.outcome())}"
        finally:
            procs.stop_all([program for program in programs.values() if program.process.poll() is None], are_late=True)
        return None

    return case


# The port spaces of UDP and of IPoIB.
SPECIAL = {
    "rdma_cm/mckey/udp": mckey("239.77.1.1", "0x111"),
    "rdma_cm/mckey/ipoib": mckey("239.77.1.2", "0x2"),
    "rdma_cm/mckey/send-only": mckey("239.77.1.3", "0x111", "-o"),
    "rdma_cm/mckey/without-loopback": mckey("239.77.1.4", "0x111", "-l"),
}
