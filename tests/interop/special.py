"""Cases with more than one command line per end."""

import filecmp
import json
import random
import shutil
import subprocess
import time

import append
import faults
import multicast
import offload
import paged
import services
from cases import FAILED, PASSED, Result, last_output
from matrix import LOSSY_PLAN
from harness import cgroup, perftest, procs

FILE_REGION = procs.ROOT / "build/examples/file_region"
FILE_LEN = 16 << 20


# The server sends 6,000 packets and some retransmissions: faults end before the last ones. A lost ACK of the last
# message cannot be repeated once its sender has ended.
STRUCK_PACKETS = 5_000
FAULTS = {"loss": 0.01, "duplicate": 0.01, "reorder": 0.01, "corrupt": 0.005, "ecn-mark": 0.01}


def validated_under_faults(log_dir):
    """The validating pingpong with a server whose sent packets are lost, duplicated, reordered and corrupted."""
    plan, port = log_dir / "plan.toml", str(procs.free_port())
    plan.write_text("seed = 7\n" + "".join(
        f'[[fault]]\nkind = "{kind}"\nprobability = {probability}\nfor_packets = {STRUCK_PACKETS}\n'
        for kind, probability in FAULTS.items()))
    program = ["ibv_rc_pingpong", "-g", "0", "-p", port, "-c", "-s", "20000", "-n", "300"]
    server = procs.under_terrace(program, "--fault-plan", str(plan))
    pair = procs.run_pair(server, procs.under_terrace([*program, procs.HOST]), int(port), log_dir, timeout_s=90)
    return _error_of(pair) or ("invalid data" if "invalid data" in pair.client.text + pair.server.text else None)


def file_under_faults(log_dir):
    """A file READ over a network with faults in both directions arrives unchanged."""
    data = log_dir / "data.bin"
    data.write_bytes(random.Random(1).randbytes(FILE_LEN))
    port = str(procs.free_port())

    def command(*arguments):
        return procs.under_terrace([str(FILE_REGION), *arguments], "--fault-plan", LOSSY_PLAN)

    pair = procs.run_pair(command("serve", "-p", port, str(data)), command("fetch", "-p", port, procs.HOST), int(port),
                          log_dir, timeout_s=90)
    return _error_of(pair) or (None if filecmp.cmp(data, log_dir / "client.out", shallow=False) else "the data differs")


def captured(log_dir):
    """Wireshark reads the file of --pcap as RoCEv2, without a malformed packet."""
    if shutil.which("tshark") is None:
        return "tshark is not installed (scripts/setup.sh conformance)"
    capture = log_dir / "client.pcap"
    port = str(procs.free_port())
    program = ["ib_write_bw", "-F", "-p", port, "-n", "20", "-s", "10000"]
    client = procs.under_terrace([*program, procs.HOST], "--pcap", str(capture))
    complaint = _error_of(procs.run_pair(procs.under_terrace(program), client, int(port), log_dir))
    if complaint:
        return complaint
    decode = ["-d", "udp.port==4791-5046,infiniband"]
    fields = ["-T", "fields", "-e", "infiniband.bth.opcode", "-e", "_ws.malformed"]
    shown = subprocess.run(["tshark", "-r", str(capture), *decode, *fields], capture_output=True, text=True, timeout=60)
    rows = [line.split("\t") for line in shown.stdout.splitlines()]
    # 20 messages of 3 packets each, and acknowledgements.
    if len(rows) < 60 or any(row[0] == "" for row in rows):
        return f"not all of {len(rows)} packets were read as RoCEv2: {shown.stderr.strip()[:200]}"
    malformed = sum(row[1:] not in ([], [""]) for row in rows)
    return f"{malformed} packets were malformed" if malformed else None


def idle(log_dir):
    """A passive server without a peer uses no processor time."""
    data = log_dir / "data.bin"
    data.write_bytes(bytes(1 << 20))
    port = procs.free_port()
    server = procs.Program(procs.under_terrace([str(FILE_REGION), "serve", "-p", str(port), str(data)]), log_dir, "server")
    try:
        deadline = time.monotonic() + 20
        while not procs.is_listening(port):
            if server.wait(0.05) is not None or time.monotonic() > deadline:
                return f"the server did not start: {last_output(server.outcome())}"
        time.sleep(0.5)
        before = procs.cpu_seconds(server.process.pid)
        time.sleep(2)
        used = procs.cpu_seconds(server.process.pid) - before
        return f"{used:.2f} s of CPU time in 2 s of idling" if used > 0.02 else None
    finally:
        server.stop()


def parallel_pairs(log_dir):
    """Three concurrent pairs at one address: each process has its own instance index, and no pair affects another."""
    pairs = []
    for index in range(3):
        port = procs.free_port()
        program = ["ib_send_bw", "-F", "-p", str(port), "-n", "500", "-s", "4096"]
        server = procs.Program(procs.under_terrace(program), log_dir, f"server-{index}")
        while not procs.is_listening(port):
            if server.wait(0.02) is not None:
                return f"server {index}: {last_output(server.outcome())}"
        pairs.append((server, [*program, procs.HOST]))
    clients = [procs.Program(procs.under_terrace(command), log_dir, f"client-{index}")
               for index, (_, command) in enumerate(pairs)]
    programs = [server for server, _ in pairs] + clients
    late = [program for program in programs if program.wait(60) is None]
    procs.stop_all(late, are_late=True)
    if late:
        return f"{len(late)} of {len(programs)} processes did not end in time"
    bad = [program.outcome() for program in programs if program.process.returncode != 0]
    bad_tables = [client for client in clients if len(perftest.parse_table(client.outcome().out)) != 1]
    if bad:
        return f"{bad[0].argv[-1]}: {last_output(bad[0])}"
    return "a client printed no result" if bad_tables else None


def statistics(log_dir):
    """`terrace stat` finds a running process and reads its counters."""
    port = procs.free_port()
    program = ["ib_write_bw", "-F", "-p", str(port), "-D", "3"]
    server = procs.Program(procs.under_terrace(program), log_dir, "server")
    while not procs.is_listening(port):
        if server.wait(0.02) is not None:
            return f"the server did not start: {last_output(server.outcome())}"
    client = procs.Program(procs.under_terrace([*program, procs.HOST]), log_dir, "client")
    pid = str(client.process.pid)
    try:
        # The client opens its device shortly after its start, and keeps it for three seconds.
        deadline = time.monotonic() + 3
        while True:
            listing = procs.run_one([str(procs.terrace_binary()), "stat"], log_dir, "stat-list", timeout_s=10)
            if listing.status != 0:
                return f"`terrace stat`: {last_output(listing)}"
            if any(line.split()[0] == pid for line in listing.out.splitlines()):
                break
            if time.monotonic() > deadline:
                return f"`terrace stat` does not list process {pid}: {last_output(listing)}"
            time.sleep(0.1)
        one = procs.run_one([str(procs.terrace_binary()), "stat", pid, "--json"], log_dir, "stat-one", timeout_s=10)
        if one.status != 0 or "tx_packets" not in json.loads(one.out)["devices"][0]["port"]:
            return f"`terrace stat {pid} --json`: {last_output(one)}"
        return None
    finally:
        client.wait(20)
        server.wait(5)
        procs.stop_all((client, server))


def _error_of(pair):
    for end, outcome in (("server", pair.server), ("client", pair.client)):
        if outcome.status != 0:
            return pair.note or f"{end}: {outcome.verdict}: {last_output(outcome)}"
    return None


SPECIAL = {
    "special/validated-under-faults": validated_under_faults,
    "special/file-under-faults": file_under_faults,
    "special/pcap-read-by-tshark": captured,
    "special/idle-uses-no-cpu": idle,
    "special/three-pairs-at-once": parallel_pairs,
    "special/terrace-stat": statistics,
    **append.SPECIAL,
    **faults.SPECIAL,
    **paged.SPECIAL,
    **services.SPECIAL,
    **offload.SPECIAL,
    **multicast.SPECIAL,
}


def run(name, case, log_dir):
    """Runs such a case: a function that returns an error message or None."""
    log_dir.mkdir(parents=True)
    started = time.monotonic()
    try:
        complaint = case(log_dir)
    except (cgroup.Unavailable, procs.UnexpectedEnd) as reason:
        complaint = str(reason)
    seconds = round(time.monotonic() - started, 2)
    return Result(name, FAILED if complaint else PASSED, complaint or "", seconds)
