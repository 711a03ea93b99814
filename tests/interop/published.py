"""Programs and libraries as their makers publish them on PyPI, crates.io and in Debian. `scripts/setup.sh conformance-programs`
installs them below build/programs, in the versions that it names."""

import os
import pathlib

import ceph
import fabtests
from cases import Case, all_of, all_verify, prints, prints_none
from harness import procs

HERE = pathlib.Path(__file__).resolve().parent
INSTALLED = procs.ROOT / "build/programs"
PYTHON = str(INSTALLED / "python/bin/python")
CRATES = INSTALLED / "crates/bin"
VALKEY = INSTALLED / "valkey-8.1.1+dfsg1"
JUCX = INSTALLED / "java/jucx-1.12.1.jar"
GLOO_CHECK = str(procs.ROOT / "build/interop/programs/gloo_check")
# Programs that no registry has, built by hand (docs/programs.md): a library, and the folder of a server and a client.
NCCL_NET, BRPC = os.environ.get("TERRACE_NCCL_NET"), os.environ.get("TERRACE_BRPC")
# With the default of two threads for each context, three threads spin on a machine with two processors.
MOONCAKE = {"MC_WORKERS_PER_CTX": "1"}


def transfer(script, env, *arguments):
    """Two processes: the initiator READs and WRITEs the target's memory, and both compare every byte."""

    def case(log_dir):
        path = str(HERE / "programs" / script)
        roles = ("target", "initiator")
        return all_verify(log_dir, {role: [PYTHON, path, role, str(log_dir), *arguments] for role in roles}, env)

    return case


def mooncake_store(log_dir):
    """A client puts objects into another process's memory, gets them, and compares every byte."""
    port, metrics_port = procs.free_port(), procs.free_port()
    # It uses no RDMA itself.
    master = procs.Program([str(INSTALLED / "python/bin/mooncake_master"), f"--rpc_port={port}", f"--metrics_port={metrics_port}"],
                           log_dir, "master")
    try:
        procs.wait_until(lambda: procs.is_listening(port), "Mooncake's master listens")
        path = str(HERE / "programs/mooncake_store.py")
        roles = {role: [PYTHON, path, role, str(log_dir), procs.HOST, f"{procs.HOST}:{port}"] for role in ("segment", "client")}
        return all_verify(log_dir, roles, MOONCAKE)
    finally:
        master.stop()


def nccl_net(log_dir):
    """A network plugin of NCCL sends and receives host memory."""
    script = str(HERE / "programs/nccl_net.py")
    roles = ("receiver", "sender")
    return all_verify(log_dir, {role: [PYTHON, script, role, str(log_dir), NCCL_NET] for role in roles}, {"NCCL_SOCKET_IFNAME": "lo"})


def gloo(log_dir):
    """Collective operations of three ranks, which compare all values."""
    addresses = log_dir / "addresses"
    addresses.mkdir()
    return all_verify(log_dir, {f"rank-{rank}": [GLOO_CHECK, str(rank), "3", str(addresses)] for rank in range(3)})


SPECIAL = {
    # Only queue pairs: without these settings UCX prefers shared memory and TCP on one host.
    "published/nixl": transfer("nixl_transfer.py", {"UCX_TLS": "rc_v,ud_v", "UCX_NET_DEVICES": "terrace0:1"}),
    "published/mooncake": transfer("mooncake_transfer.py", MOONCAKE, procs.HOST),
    "published/mooncake-store": mooncake_store,
    "published/gloo": gloo,
    **ceph.SPECIAL,
    **({"published/nccl-net": nccl_net} if NCCL_NET else {}),
}


def valkey_case():
    """Valkey with its RDMA module. Four clients of its own test program, each with a thread and a connection, set up to 2,048
    values of 1 KiB and compare what they get. One of them asks for a snapshot, which a forked child writes."""
    server = (str(VALKEY / "valkey-server"), "--port", "0", "--protected-mode", "no", "--save", "", "--dir", str(VALKEY),
              "--loadmodule", str(VALKEY / "valkey-rdma.so"), "--rdma-port", "{port}", "--rdma-bind", "{addr}")
    client = (str(VALKEY / "rdma-test"), "--host", "{addr}", "--port", "{port}", "--thread", "4", "-m", "256", "-M", "2048")
    return Case("published/valkey", server, client, check=prints("BGSAVE [OK]", "test [OK]"), addr="127.0.0.57",
                client_addr="127.0.0.58", is_server_permanent=True)


def jucx_case():
    """JUCX's own benchmark: the receiver READs the sender's memory, and `-ea` compares its hash."""
    def role(name):
        return ("java", "-ea", "-cp", str(JUCX), f"org.openucx.jucx.examples.UcxReadBWBenchmark{name}", "s={addr}", "p={port}", "t=8388608")

    # In a JVM, UCX cannot follow unmapped memory, and registers all memory on demand. UCX 1.13 then crashes when it closes
    # (uct_ib_md_release_reg_method passes a handle for parameters).
    env = {"UCX_TLS": "rc_v,ud_v", "UCX_NET_DEVICES": "terrace0:1", "UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_IB_REG_METHODS": "direct"}
    return Case("published/jucx", role("Receiver"), role("Sender"), addr="127.0.0.59", client_addr="127.0.0.60", env=env,
                check=prints("Iteration 4,", end="server"))


def brpc_case():
    """brpc's `rdma_performance`: the server returns the requests' attachments. The rate that the client prints is not 0."""
    server = (f"{BRPC}/server", "--use_rdma=true", "--port={port}")
    client = (f"{BRPC}/client", "--use_rdma=true", "--servers={addr}:{port}", "--test_seconds=2", "--thread_num=2",
              "--attachment_size=65536", "--echo_attachment=true")
    return Case("published/brpc", server, client, check=all_of(prints("RDMA: yes", "QPS: "), prints_none("QPS: 0k")),
                addr="127.0.0.61", client_addr="127.0.0.62", is_server_permanent=True)


def all_cases():
    """The programs that are a server and a client, or one process."""
    # It uses GID 1: the loopback's IPv6 address.
    yield Case("published/ibverbs-loopback", single=(str(CRATES / "loopback"),), check=prints("sent", "received", end="program"))
    yield Case("published/sideway-devinfo", single=(str(CRATES / "ibv_devinfo"),), check=prints("terrace0", end="program"))
    pingpong = (str(CRATES / "rc_pingpong"), "-p", "{port}", "-g", "0")
    yield Case("published/sideway-pingpong", pingpong, (*pingpong, "{host}"), check=prints("bytes in"))
    yield valkey_case()
    yield jucx_case()
    if BRPC:
        yield brpc_case()
    yield from fabtests.cases()
