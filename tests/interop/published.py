"""Programs and libraries as their makers publish them on PyPI and crates.io. `scripts/setup.sh conformance-programs` installs
them below build/programs, in the versions that it names."""

import pathlib

from cases import Case, last_output, prints
from harness import procs

HERE = pathlib.Path(__file__).resolve().parent
INSTALLED = procs.ROOT / "build/programs"
PYTHON = str(INSTALLED / "python/bin/python")
CRATES = INSTALLED / "crates/bin"
LIMIT_S = 90


def transfer(script, env, *arguments):
    """Two processes: the initiator READs and WRITEs the target's memory, and both compare every byte."""

    def case(log_dir):
        def start(role):
            command = [PYTHON, str(HERE / "programs" / script), role, str(log_dir), *arguments]
            return procs.Program(procs.under_terrace(command), log_dir, role, env)

        programs = {role: start(role) for role in ("target", "initiator")}
        try:
            for role, program in programs.items():
                status = program.wait(LIMIT_S)
                if status != 0:
                    return f"the {role} {'is late' if status is None else 'failed'}: {last_output(program.outcome())}"
                if "verified" not in program.outcome().out:
                    return f"the {role} verified nothing: {last_output(program.outcome())}"
        finally:
            procs.stop_all([program for program in programs.values() if program.process.poll() is None], are_late=True)
        return None

    return case


SPECIAL = {
    # Only queue pairs: without these settings UCX prefers shared memory and TCP on one host.
    "published/nixl": transfer("nixl_transfer.py", {"UCX_TLS": "rc_v,ud_v", "UCX_NET_DEVICES": "terrace0:1"}),
    # With the default of two threads for each context, three threads spin on a machine with two processors.
    "published/mooncake": transfer("mooncake_transfer.py", {"MC_WORKERS_PER_CTX": "1"}, procs.HOST),
}


def all_cases():
    """Examples of crates over verbs, each with its own way to say that all is well."""
    # It uses GID 1: the loopback's IPv6 address.
    yield Case("published/ibverbs-loopback", single=(str(CRATES / "loopback"),), check=prints("sent", "received", end="program"))
    yield Case("published/sideway-devinfo", single=(str(CRATES / "ibv_devinfo"),), check=prints("terrace0", end="program"))
    pingpong = (str(CRATES / "rc_pingpong"), "-p", "{port}", "-g", "0")
    yield Case("published/sideway-pingpong", pingpong, (*pingpong, "{host}"), check=prints("bytes in"))
