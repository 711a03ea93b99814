"""Debian's services that use RDMA, run as by their users. The data is compared at the end."""

import contextlib
import json
import random
import socket
import time

from cases import last_output
from harness import procs

MIB = 1 << 20
SERVER, CLIENT = "127.0.0.52", "127.0.0.53"
LIMIT_S = 90

# ---- QEMU: migration of a machine by RDMA WRITE ----

RAM_MIB = 96
# Random bytes in the machine's memory, above the range that its program changes and below that of its firmware.
RANDOM_AT, RANDOM_BYTES = 16 * MIB, 48 * MIB
BOOT_SECTOR_BYTES = 512
# An endless 16-bit program that adds 1 to every word from 0x10000 to 0x9ffff, so that pages change during the
# migration.
CHANGES_MEMORY = bytes.fromhex(
    "b80010"  # again:   mov ax, 0x1000
    "8ec0"  #   segment: mov es, ax
    "31ff"  #            xor di, di
    "26ff05"  # word:    inc word [es:di]
    "83c702"  #          add di, 2
    "75f8"  #            jnz word
    "050010"  #          add ax, 0x1000
    "3d00a0"  #          cmp ax, 0xa000
    "75ec"  #            jne segment
    "ebe7"  #            jmp again
)


class Machine:
    """A QEMU in pure emulation, controlled through QMP."""

    def __init__(self, address, log_dir, name, *options):
        self.path = log_dir / f"{name}.qmp"
        argv = ["qemu-system-x86_64", "-accel", "tcg", "-m", str(RAM_MIB), "-nodefaults", "-no-user-config", "-display", "none",
                "-drive", f"if=floppy,format=raw,file={log_dir / 'boot.img'},file.locking=off", "-boot", "a",
                "-qmp", f"unix:{self.path},server=on,wait=off", *options]
        self.program = procs.Program(procs.under_terrace(argv, addr=address), log_dir, name)
        self._connect()
        self.execute("qmp_capabilities")

    def _connect(self):
        deadline = time.monotonic() + LIMIT_S
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(LIMIT_S)
        while True:
            with contextlib.suppress(OSError):
                self._socket.connect(str(self.path))
                break
            if self.program.wait(0.05) is not None or time.monotonic() > deadline:
                raise Failed(f"QEMU did not start: {last_output(self.program.outcome())}")
        self._lines = self._socket.makefile("rw")
        self._lines.readline()  # its greeting

    def execute(self, command, **arguments):
        self._lines.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self._lines.flush()
        while True:
            line = self._lines.readline()
            if not line:
                self.program.wait(5)
                raise Failed(f"QEMU {self.program.outcome().verdict}: {last_output(self.program.outcome())}")
            answer = json.loads(line)
            if "error" in answer:
                raise Failed(f"QEMU rejects {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]

    def wait_for_migration(self):
        deadline = time.monotonic() + LIMIT_S
        while (state := self.execute("query-migrate")).get("status") != "completed":
            if state.get("status") in ("failed", "cancelled") or time.monotonic() > deadline:
                raise Failed(f"migration: {state.get('status')}: {state.get('error-desc')}: {last_output(self.program.outcome())}")
            time.sleep(0.1)
        return state

    def memory(self, path):
        self.execute("pmemsave", val=0, size=RAM_MIB * MIB, filename=str(path))
        data = path.read_bytes()
        path.unlink()
        return data

    def close(self):
        self.program.stop()


class Failed(Exception):
    """An error message."""


def _returns_failures(case):
    """Makes a case that raises `Failed` return its message."""

    def run(log_dir):
        try:
            return case(log_dir)
        except Failed as failed:
            return str(failed)

    return run


def migration(pin_all):
    """A running machine migrates to another QEMU with identical memory.

    On a busy machine QEMU 7.2 without KVM loses the last stores now and then, by TCP, too: 1 of 162 migrations, six at a time."""

    @_returns_failures
    def case(log_dir):
        boot = CHANGES_MEMORY.ljust(BOOT_SECTOR_BYTES - 2, b"\0") + b"\x55\xaa"
        (log_dir / "boot.img").write_bytes(boot.ljust(1440 << 10, b"\0"))
        noise = random.Random(5).randbytes(RANDOM_BYTES)
        (log_dir / "noise.bin").write_bytes(noise)
        port = procs.free_port()
        loader = f"loader,file={log_dir / 'noise.bin'},addr={RANDOM_AT},force-raw=on"
        with contextlib.ExitStack() as stack:
            # The machine is not resumed, so its memory does not change after arrival.
            there = Machine(SERVER, log_dir, "destination", "-S", "-incoming", "defer")
            stack.callback(there.close)
            here = Machine(CLIENT, log_dir, "source", "-device", loader)
            stack.callback(here.close)
            for machine in (there, here):
                machine.execute("migrate-set-capabilities",
                            capabilities=[{"capability": "rdma-pin-all", "state": pin_all}])
            there.execute("migrate-incoming", uri=f"rdma:{SERVER}:{port}")
            before = here.memory(log_dir / "before.bin")
            here.execute("migrate", uri=f"rdma:{SERVER}:{port}")
            state = here.wait_for_migration()
            moved, arrived = (machine.memory(log_dir / "memory.bin") for machine in (here, there))
        (log_dir / "noise.bin").unlink()
        if moved != arrived:
            first = next(index for index, (left, right) in enumerate(zip(moved, arrived)) if left != right)
            return f"the memory differs, first at {first:#x}"
        if arrived[RANDOM_AT:][:RANDOM_BYTES] != noise:
            return "the random bytes are missing"
        if before[0x10000:0x20000] == arrived[0x10000:0x20000]:
            return "the machine did not run during the migration"
        return None if state["ram"]["transferred"] > RANDOM_BYTES else f"the migration did not use RDMA: {state}"

    return case


# ---- fio ----


BLOCK_BYTES = 64 << 10
# fio's server has no deeper queue.
DEPTH_MAX = 512


def fio(verb, server_depth=8, blocks=1024):
    """fio's RDMA engine: a server and a client transfer all blocks. With every verb the client writes."""
    size = blocks * BLOCK_BYTES

    def case(log_dir):
        port = procs.free_port()
        common = ["fio", "--ioengine=rdma", f"--port={port}", f"--bs={BLOCK_BYTES}", f"--size={size}",
                  "--output-format=json"]
        server = [*common, "--name=server", "--rw=read", f"--iodepth={server_depth}"]
        client = [*common, "--name=client", "--iodepth=8", "--rw=write", f"--verb={verb}", f"--hostname={SERVER}"]
        pair = procs.run_pair(procs.under_terrace(server, addr=SERVER), procs.under_terrace(client, addr=CLIENT), port, log_dir,
                              timeout_s=LIMIT_S)
        for end, outcome in (("server", pair.server), ("client", pair.client)):
            if outcome.status != 0:
                return pair.note or f"{end}: {outcome.verdict}: {last_output(outcome)}"
        job = json.loads(pair.client.out[pair.client.out.index("{"):])["jobs"][0]
        moved = job["write"]["io_bytes"]
        return None if moved == size and job["error"] == 0 else f"{moved} bytes, error {job['error']}"

    return case


SPECIAL = {
    "service/qemu-migration": migration(pin_all=False),
    "service/qemu-migration-pin-all": migration(pin_all=True),
    "service/fio-write": fio("write"),
    "service/fio-read": fio("read"),
    # fio asks for no RNR retries (its rnr_retry_count is 0), so a message that finds no receive ends its queue pair. The server
    # must have posted the receives of all messages in the half second that the client waits for it.
    "service/fio-send": fio("send", server_depth=DEPTH_MAX, blocks=DEPTH_MAX),
}
