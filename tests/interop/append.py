"""Records that many clients append to one file, while the network loses packets and clients are killed or stopped."""

import random
import signal
import struct
import time

from cases import last_output
from matrix import LOSSY_PLAN
from harness import procs

STRESS = procs.ROOT / "build/interop/programs/append_stress"
HEADER, ACKNOWLEDGED = struct.Struct("<6I"), struct.Struct("<4IQ")
MAGIC = 0x54415052
TIMEOUT_S = 90


def check_file(path, logs):
    """Compares the file with what the clients were told. Returns a complaint or None."""
    data, found, at = path.read_bytes(), {}, 0
    while at < len(data):
        if len(data) - at < HEADER.size:
            return f"{len(data) - at} bytes at the end are no record"
        magic, client, queue, sequence, length, seed = HEADER.unpack_from(data, at)
        if magic != MAGIC or not HEADER.size <= length <= len(data) - at:
            return f"no record begins at {at}: there is a hole, or the record before is torn"
        if data[at + HEADER.size:at + length] != _content(seed, length - HEADER.size):
            return f"the record at {at} is torn"
        if (client, queue, sequence) in found:
            return f"record {sequence} of queue pair {queue} of client {client} is there twice"
        found[client, queue, sequence] = (at, length)
        at += length
    acknowledged = [line for log in logs for line in ACKNOWLEDGED.iter_unpack(_whole_lines(log))]
    for client, queue, sequence, length, offset in acknowledged:
        place = found.get((client, queue, sequence))
        if place != (offset, length):
            return f"record {sequence} of queue pair {queue} of client {client} was acknowledged at {offset}, and is at {place}"
    last = {}
    for (client, queue, sequence), _ in sorted(found.items(), key=lambda item: item[1]):
        if last.get((client, queue), -1) >= sequence:
            return f"records of queue pair {queue} of client {client} are out of order"
        last[client, queue] = sequence
    return None if acknowledged else "nothing was acknowledged"


def _content(seed, length):
    """The bytes of a record behind its header, which repeat every 256 bytes."""
    cycle = bytes((seed + index * 131) & 0xff for index in range(HEADER.size, HEADER.size + 256))
    return (cycle * (length // 256 + 1))[:length]


def _whole_lines(log):
    data = log.read_bytes() if log.exists() else b""
    return data[:len(data) // ACKNOWLEDGED.size * ACKNOWLEDGED.size]


def stress(clients, queues, records, bytes_max, *options, kills=0):
    """`clients` processes with `queues` queue pairs each append `records` records for each. Then `kills` of them are killed at random
    moments and others stopped for a while."""

    def case(log_dir):
        rng, port = random.Random(1), procs.free_port()
        path, logs = log_dir / "file", [log_dir / f"acknowledged-{client}" for client in range(clients)]
        server = procs.Program(procs.under_terrace([str(STRESS), "serve", "-p", str(port), str(path)], *options), log_dir, "server")
        running = []
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not procs.is_listening(port):
                if server.wait(0.05) is not None or time.monotonic() > deadline:
                    return f"the server did not start: {last_output(server.outcome())}"
            for client, log in enumerate(logs):
                argv = [str(STRESS), "append", "-p", str(port), "-c", str(client), "-q", str(queues), "-n", str(records),
                        "-b", str(bytes_max), "-l", str(log), procs.HOST]
                running.append(procs.Program(procs.under_terrace(argv, *options), log_dir, f"client-{client}"))
            victims = rng.sample(running, kills)
            for victim in victims:
                time.sleep(rng.uniform(0.05, 0.5))
                victim.process.send_signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0, 0.2))
                victim.process.send_signal(rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGCONT]))
            for program in running:
                if program.wait(max(deadline - time.monotonic(), 0.1)) is None:
                    return f"a client did not end in {TIMEOUT_S} s"
                outcome = program.outcome()
                if program not in victims and outcome.status != 0:
                    return f"{outcome.verdict}: {last_output(outcome)}"
            server.process.send_signal(signal.SIGTERM)
            if server.wait(20) != 0:
                return f"server: {server.outcome().verdict}: {last_output(server.outcome())}"
            return check_file(path, logs)
        finally:
            for program in running:
                program.stop()
            server.stop()
            path.unlink(missing_ok=True)

    return case


SPECIAL = {
    "append/one-client": stress(1, 1, 2000, 4096),
    "append/records-of-1-MiB": stress(2, 2, 40, 1 << 20),
    "append/8-clients": stress(8, 1, 1000, 16 << 10),
    "append/64-queue-pairs": stress(8, 8, 300, 4096),
    "append/killed-clients": stress(8, 4, 2000, 64 << 10, kills=6),
    "append/lossy": stress(8, 2, 200, 64 << 10, "--fault-plan", LOSSY_PLAN, kills=3),
}
