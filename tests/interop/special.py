"""Cases that are more than one command line per end."""

import shutil
import subprocess
import time

from cases import FAILED, PASSED, Result, last_line
from harness import perftest, procs

FILE_REGION = procs.ROOT / "build/examples/file_region"

# Every kind of fault at once; RC must come through it with nothing lost.
LOSSY_PLAN = """\
seed = 7
loss = 0.01
duplicate = 0.01
reorder = 0.01
corrupt = 0.005
"""


def under_faults(log_dir):
    """RC over a bad network: the validating pingpong, both ends dropping, doubling, reordering and corrupting."""
    plan = log_dir / "plan.toml"
    plan.write_text(LOSSY_PLAN)
    port = str(procs.free_port())
    program = ["ibv_rc_pingpong", "-g", "0", "-p", port, "-c", "-s", "20000", "-n", "300"]
    server = procs.under_terrace(program, "--fault-plan", str(plan))
    pair = procs.run_pair(server, [*server, procs.HOST], int(port), log_dir, timeout_s=90)
    return _complaint(pair) or ("invalid data" in pair.client.text and "invalid data" or None)


def captured(log_dir):
    """--pcap writes what Wireshark reads as RoCEv2, none of it malformed."""
    if shutil.which("tshark") is None:
        return "tshark is not installed (scripts/setup.sh conformance)"
    capture = log_dir / "client.pcap"
    port = str(procs.free_port())
    program = ["ib_write_bw", "-F", "-p", port, "-n", "20", "-s", "10000"]
    client = procs.under_terrace([*program, procs.HOST], "--pcap", str(capture))
    complaint = _complaint(procs.run_pair(procs.under_terrace(program), client, int(port), log_dir))
    if complaint:
        return complaint
    fields = ["-T", "fields", "-e", "_ws.col.Protocol", "-e", "_ws.malformed"]
    shown = subprocess.run(["tshark", "-r", str(capture), *fields], capture_output=True, text=True, timeout=60)
    lines = shown.stdout.splitlines()
    roce = [line for line in lines if line.startswith("RRoCE")]
    if len(roce) < 60 or len(roce) != len(lines):
        return f"{len(roce)} of {len(lines)} packets were read as RoCEv2: {shown.stderr.strip()[:200]}"
    malformed = [line for line in roce if line.split("\t", 1)[1:] not in ([], [""])]
    return f"{len(malformed)} packets were malformed" if malformed else None


def idle(log_dir):
    """A passive server whose peer is not there uses no CPU."""
    data = log_dir / "data.bin"
    data.write_bytes(bytes(1 << 20))
    port = procs.free_port()
    server = procs.Program(procs.under_terrace([str(FILE_REGION), "serve", "-p", str(port), str(data)]), log_dir, "server")
    try:
        deadline = time.monotonic() + 20
        while not procs.is_listening(port):
            if server.wait(0.05) is not None or time.monotonic() > deadline:
                return f"the server did not start: {last_line(server.outcome())}"
        time.sleep(0.5)
        before = procs.cpu_seconds(server.process.pid)
        time.sleep(2)
        used = procs.cpu_seconds(server.process.pid) - before
        return f"{used:.2f} s of CPU time in 2 s of idling" if used > 0.02 else None
    finally:
        server.stop()


def neighbours(log_dir):
    """Three pairs at once on one address: each process has its own slot, none disturbs another."""
    pairs = []
    for index in range(3):
        port = procs.free_port()
        program = ["ib_send_bw", "-F", "-p", str(port), "-n", "500", "-s", "4096"]
        server = procs.Program(procs.under_terrace(program), log_dir, f"server-{index}")
        while not procs.is_listening(port):
            if server.wait(0.02) is not None:
                return f"server {index}: {last_line(server.outcome())}"
        pairs.append((server, [*program, procs.HOST]))
    clients = [procs.Program(procs.under_terrace(command), log_dir, f"client-{index}")
               for index, (_, command) in enumerate(pairs)]
    programs = [server for server, _ in pairs] + clients
    late = [program for program in programs if program.wait(60) is None]
    for program in late:
        program.stop()
    if late:
        return f"{len(late)} of {len(programs)} processes did not end in time"
    bad = [program.outcome() for program in programs if program.process.returncode != 0]
    bad_tables = [client for client in clients if len(perftest.parse_table(client.outcome().out)) != 1]
    if bad:
        return f"{bad[0].argv[-1]}: {last_line(bad[0])}"
    return "a client printed no result" if bad_tables else None


def statistics(log_dir):
    """`terrace stat` finds a running process and reads its counters."""
    port = procs.free_port()
    program = ["ib_write_bw", "-F", "-p", str(port), "-D", "3"]
    server = procs.Program(procs.under_terrace(program), log_dir, "server")
    while not procs.is_listening(port):
        if server.wait(0.02) is not None:
            return f"the server did not start: {last_line(server.outcome())}"
    client = procs.Program(procs.under_terrace([*program, procs.HOST]), log_dir, "client")
    try:
        time.sleep(1.5)
        stat = [str(procs.terrace_binary()), "stat"]
        listing = procs.run_one(stat, log_dir, "stat-list", timeout_s=10)
        one = procs.run_one([*stat, str(client.process.pid), "--json"], log_dir, "stat-one", timeout_s=10)
        if listing.status != 0 or str(client.process.pid) not in listing.out:
            return f"`terrace stat` does not list process {client.process.pid}: {last_line(listing)}"
        if one.status != 0 or "packets" not in one.out:
            return f"`terrace stat {client.process.pid} --json`: {last_line(one)}"
        return None
    finally:
        client.wait(20)
        server.wait(5)
        client.stop()
        server.stop()


def _complaint(pair):
    for end, outcome in (("server", pair.server), ("client", pair.client)):
        if outcome.status != 0:
            return pair.note or f"{end}: {outcome.verdict}: {last_line(outcome)}"
    return None


SPECIAL = {
    "special/rc-under-faults": under_faults,
    "special/pcap-read-by-tshark": captured,
    "special/idle-uses-no-cpu": idle,
    "special/three-pairs-at-once": neighbours,
    "special/terrace-stat": statistics,
}


def run(name, log_dir):
    """Runs one of them."""
    log_dir.mkdir(parents=True)
    started = time.monotonic()
    complaint = SPECIAL[name](log_dir)
    seconds = round(time.monotonic() - started, 2)
    return Result(name, FAILED if complaint else PASSED, complaint or "", seconds)
