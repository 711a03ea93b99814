"""Fault plans as in use: their effects on a program, and the counts that are printed afterwards."""

import json
import re
import time

from cases import last_output
from harness import procs

RESILIENT_SEND = procs.ROOT / "build/examples/resilient_send"
FILE_REGION = procs.ROOT / "build/examples/file_region"
EXAMPLE_PLAN = procs.ROOT / "examples/faults.toml"

RNR_EXCEEDED = "RNR retry counter exceeded"
RETRY_EXCEEDED = "transport retry counter exceeded"

# Kind -> the rest of its fault, and the name of its count. Each is injected into a server that answers pings; packets
# of the two directions alternate, so a plan always applies to the first hundred packets. Faults that lose packets end
# before the last of the 200 pings, of six packets each way: a lost ACK of the last message cannot be repeated once its
# sender has ended.
KINDS = {
    "loss": ("probability = 0.05\nfor_packets = 600", "packets_lost"),
    "loss-in": ('probability = 0.05\ndirection = "in"\nfor_packets = 600', "packets_lost"),
    "loss-of-peer": (f'peer = "{procs.HOST}"\nafter_packets = 50\nfor_packets = 2', "packets_lost"),
    "duplicate": ("probability = 0.2", "packets_duplicated"),
    "corrupt": ("probability = 0.05\nfor_packets = 600", "packets_corrupted"),
    "reorder": ("probability = 0.05\nreorder_us_max = 500", "packets_reordered"),
    "delay": ("after_packets = 10\nfor_packets = 50\ndelay_us_max = 300", "packets_delayed"),
    "ecn-mark": ("probability = 0.2", "packets_marked"),
    "blackhole": ("after_packets = 60\nfor_ms = 40", "packets_blackholed"),
    "rnr": ("probability = 0.1\nafter_operations = 20", "rnr_naks"),
}


def injected(text):
    """The injected faults that a program printed at its exit: {count: number}."""
    found = re.findall(r"fault plan \S+ has injected: (.*)", text)
    if not found:
        return None
    return {name: int(number) for name, number in re.findall(r"(\w+) (\d+)", found[-1])}


def one_kind(kind):
    """A pingpong with validation survives this kind of fault, and the count shows that one was injected."""
    keys, count = KINDS[kind]
    name = {"loss-in": "loss", "loss-of-peer": "loss"}.get(kind, kind)

    def case(log_dir):
        plan = log_dir / "plan.toml"
        plan.write_text(f'seed = 3\n[[fault]]\nkind = "{name}"\n{keys}\n')
        port = str(procs.free_port())
        program = ["ibv_rc_pingpong", "-g", "0", "-p", port, "-c", "-s", "6000", "-n", "200"]
        server = procs.under_terrace(program, "--fault-plan", str(plan))
        pair = procs.run_pair(server, procs.under_terrace([*program, procs.HOST]), int(port), log_dir, timeout_s=60)
        for end, outcome in (("server", pair.server), ("client", pair.client)):
            if outcome.status != 0:
                return pair.note or f"{end}: {outcome.verdict}: {last_output(outcome)}"
        if "invalid data" in pair.client.text + pair.server.text:
            return "invalid data"
        counts = injected(pair.server.err)
        return None if counts and counts.get(count, 0) > 0 else f"the server printed {counts}, without {count}"

    return case


def resilient(log_dir):
    """The example program survives an outage and a lack of receives, and every message arrives once."""
    pair = _resilient(log_dir, EXAMPLE_PLAN)
    for end, outcome in (("server", pair.server), ("client", pair.client)):
        if outcome.status != 0:
            return pair.note or f"{end}: {outcome.verdict}: {last_output(outcome)}"
    for said in (RNR_EXCEEDED, RETRY_EXCEEDED):
        if said not in pair.client.out:
            return f"the client got no error: {said}"
    if "5000 messages, each once and in order" not in pair.server.out:
        return f"the server printed: {last_output(pair.server)}"
    counts = injected(pair.server.err) or {}
    if counts.get("rnr_naks") != 8 or not counts.get("packets_blackholed"):
        return f"the server printed {counts}"
    return None


def fragile(log_dir):
    """The same program without its error handling ends at the first error: the plan finds the mistake."""
    pair = _resilient(log_dir, EXAMPLE_PLAN, "--fragile")
    if pair.client.status != 1 or "not all messages could be sent" not in pair.client.out:
        return f"the client: {pair.client.verdict}: {last_output(pair.client)}"
    return None if RNR_EXCEEDED in pair.client.out else f"the client got no RNR error: {last_output(pair.client)}"


def _resilient(log_dir, plan, *options):
    port = str(procs.free_port())
    server = procs.under_terrace([str(RESILIENT_SEND), "serve", "-p", port], "--fault-plan", str(plan))
    client = procs.under_terrace([str(RESILIENT_SEND), "send", *options, "-p", port, procs.HOST])
    return procs.run_pair(server, client, int(port), log_dir, timeout_s=60)


def statistics(log_dir):
    """`terrace stat` shows the injected faults while the program runs."""
    plan, port = log_dir / "plan.toml", procs.free_port()
    plan.write_text("duplicate = 0.01\n")
    program = ["ib_write_bw", "-F", "-p", str(port), "-D", "3"]
    server = procs.Program(procs.under_terrace(program), log_dir, "server")
    while not procs.is_listening(port):
        if server.wait(0.02) is not None:
            return f"the server did not start: {last_output(server.outcome())}"
    client = procs.Program(procs.under_terrace([*program, procs.HOST], "--fault-plan", str(plan)), log_dir, "client")
    command = [str(procs.terrace_binary()), "stat", str(client.process.pid)]
    try:
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            shown = procs.run_one([*command, "--json"], log_dir, "stat", timeout_s=10)
            if shown.status == 0 and json.loads(shown.out)["devices"][0].get("injected", {}).get("packets_duplicated", 0) > 0:
                text = procs.run_one(command, log_dir, "stat-text", timeout_s=10).out
                return None if "injected by the fault plan" in text else "`terrace stat PID` does not show the faults"
            time.sleep(0.1)
        return f"`terrace stat --json` never showed the faults: {last_output(shown)}"
    finally:
        for program in (client, server):
            program.wait(10)
        procs.stop_all((client, server))


def storage(kind, keys, check):
    """A region larger than memory whose file is slow or fails. `check` judges both ends, the injected faults, and
    the file."""

    def case(log_dir):
        data, plan, port = log_dir / "data.bin", log_dir / "plan.toml", str(procs.free_port())
        data.write_bytes(bytes(range(256)) * (1 << 14))
        plan.write_text(f'[[fault]]\nkind = "{kind}"\n{keys}\n')
        server = procs.under_terrace([str(FILE_REGION), "serve", "--odp", "-p", port, str(data)], "--dram", "1M",
                                     "--fault-plan", str(plan))
        client = procs.under_terrace([str(FILE_REGION), "fetch", "-p", port, procs.HOST])
        pair = procs.run_pair(server, client, int(port), log_dir, timeout_s=60)
        arrived = (log_dir / "client.out").read_bytes() == data.read_bytes()
        return check(pair, injected(pair.server.err) or {}, arrived)

    return case


def _check_slow_storage(pair, counts, arrived):
    if pair.client.status != 0 or not arrived:
        return f"the client: {pair.client.verdict}: {last_output(pair.client)}"
    if pair.client.seconds < 0.3:
        return f"the client took only {pair.client.seconds:.2f} s"
    return None if counts.get("storage_slowed") else f"the server printed {counts}"


def _check_failed_storage(pair, counts, arrived):
    if pair.client.status == 0 or arrived or "remote operation error" not in pair.client.text:
        return f"the client got no error: {pair.client.verdict}: {last_output(pair.client)}"
    if pair.server.status not in (0, 1):
        return f"the server: {pair.server.verdict}: {last_output(pair.server)}"
    return None if counts.get("storage_failed") else f"the server printed {counts}"


SPECIAL = {
    **{f"special/fault-{kind}": one_kind(kind) for kind in KINDS},
    "special/fault-slow-storage": storage("slow-storage", "delay_us_min = 300000\nfor_operations = 4", _check_slow_storage),
    "special/fault-failing-storage": storage("failing-storage", "after_operations = 1", _check_failed_storage),
    "special/fault-example": resilient,
    "special/fault-example-fragile": fragile,
    "special/fault-statistics": statistics,
}
