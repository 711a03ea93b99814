"""Programs that connect by IP address, through the system's librdmacm (rdma_cm)."""

import json
import pathlib

from cases import Case, all_of, prints, prints_none, run_quietly, table_rows

# Two addresses, which represent two hosts.
SERVER, CLIENT = "127.0.0.50", "127.0.0.51"

LOSSY_PLAN = str(pathlib.Path(__file__).resolve().parent / "lossy.toml")

# rping checks the returned data (-V) and reports a difference.
RPING = ("rping", "-p", "{port}", "-C", "10", "-v", "-V")
RPING_OK = all_of(prints("rdma-ping-9:"), prints_none("data mismatch", "error"))


def rping_cases():
    def case(name, *options, host="{addr}", bind=("-a", "{addr}"), **more):
        server = (*RPING, "-s", *bind, *options)
        return Case(f"rdma_cm/rping/{name}", server, (*RPING, "-c", "-a", host, *options), check=RPING_OK,
                    **{"addr": SERVER, "client_addr": CLIENT, **more})

    yield case("two-hosts")
    yield case("one-host", client_addr=SERVER)
    yield case("any-address", bind=())
    yield case("ipv6", addr="::1", client_addr="::1")
    yield case("loopback", addr="127.0.0.1", client_addr="127.0.0.1")
    yield case("64-kib", "-S", "65000")
    yield case("lossy", run_options=("--fault-plan", LOSSY_PLAN))
    yield case("persistent", client_addr=CLIENT, bind=("-a", "{addr}", "-P"), is_server_permanent=True)


# Program -> options of both ends, of the server, of the client; the output of a successful client.
PROGRAMS = {
    "rdma_server": (["-p", "{port}"], [], ["-s", "{addr}"], "end 0"),
    "rdma_xserver": (["-p", "{port}"], [], ["-s", "{addr}"], "end 0"),
    "ucmatose": (["-p", "{port}", "-c", "10", "-C", "10"], ["-b", "{addr}"], ["-s", "{addr}"], "return status 0"),
    "rstream": (["-p", "{port}", "-C", "100", "-S", "4096"], [], ["-s", "{addr}"], "4k"),
    "riostream": (["-p", "{port}", "-C", "100", "-S", "4096"], [], ["-s", "{addr}"], "custom"),
}
CLIENTS = {"rdma_server": "rdma_client", "rdma_xserver": "rdma_xclient"}


def example_cases():
    for program, (both, server, client, needle) in PROGRAMS.items():
        yield Case(f"rdma_cm/{program}", (program, *both, *server), (CLIENTS.get(program, program), *both, *client),
                   check=prints(needle), addr=SERVER, client_addr=CLIENT)
    yield Case("rdma_cm/rdma_xserver/xrc", ("rdma_xserver", "-c", "x", "-p", "{port}"),
               ("rdma_xclient", "-c", "x", "-p", "{port}", "-s", "{addr}"), check=prints("end 0"), addr=SERVER, client_addr=CLIENT)
    # Its port is a constant.
    udaddy = ("udaddy", "-c", "5", "-C", "10")
    yield Case("rdma_cm/udaddy", (*udaddy, "-b", "{addr}"), (*udaddy, "-s", "{addr}"), check=prints("return status 0"),
               addr=SERVER, client_addr=CLIENT, fixed_port=7174)
    many = ["-p", "{port}", "-c", "200", "-C", "2"]
    yield Case("rdma_cm/ucmatose/200-connections", ("ucmatose", *many), ("ucmatose", *many, "-s", "{addr}"),
               check=prints("return status 0"), addr=SERVER, client_addr=CLIENT)


def perftest_cases():
    for tool, service in (("ib_read_bw", "RC"), ("ib_write_bw", "RC"), ("ib_send_bw", "RC"), ("ib_send_bw", "UD"),
                          ("ib_read_lat", "RC"), ("ib_write_lat", "RC"), ("ib_send_lat", "RC"), ("ib_atomic_bw", "RC")):
        server = (tool, "-R", "-F", "-c", service, "-p", "{port}", "-n", "500")
        yield Case(f"rdma_cm/{tool}/{service}", server, (*server, "{addr}"), check=table_rows(1), addr=SERVER,
                   client_addr=CLIENT, is_unreliable=service != "RC")
    server = ("ib_read_bw", "-R", "-F", "-p", "{port}", "-q", "4", "-n", "500")
    yield Case("rdma_cm/ib_read_bw/4-qps", server, (*server, "{addr}"), check=table_rows(1), addr=SERVER, client_addr=CLIENT)


# Sockets of an unmodified program become rsockets by librdmacm's own preloaded library, which must precede Terrace's.
RSPRELOAD = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so"
IPERF_BYTES = "64M"


def iperf_cases():
    def over_rsockets(*argv):
        return ("sh", "-c", f"LD_PRELOAD={RSPRELOAD}:$LD_PRELOAD exec {' '.join(argv)}")

    server = over_rsockets("iperf", "-s", "-P", "1", "-B", "{addr}", "-p", "{port}")
    client = over_rsockets("iperf", "-c", "{addr}", "-p", "{port}", "-n", IPERF_BYTES)
    # Sockets of TCP would have the client's address from the kernel: 127.0.0.1.
    check = all_of(prints("64.0 MBytes", f"local {CLIENT} port"), prints_none("failed"))
    yield Case("rdma_cm/iperf-over-rsockets", server, client, check=check, addr=SERVER, client_addr=CLIENT, is_server_permanent=True)


# The reliable-datagram layer is libfabric's own (ofi_rxm); its tagged messages are matched in software.
LIBFABRIC_VARIANTS = [
    ("msg", ["-p", "verbs", "-e", "msg"]),
    ("rdm", ["-p", "verbs;ofi_rxm", "-e", "rdm"]),
    ("rdm-tagged", ["-p", "verbs;ofi_rxm", "-e", "rdm", "-m", "tagged"]),
    ("rdm-1m", ["-p", "verbs;ofi_rxm", "-e", "rdm", "-S", "1048576"]),
    ("msg-one-byte", ["-p", "verbs", "-e", "msg", "-S", "1"]),
]


def network_address():
    """An IPv4 address outside of the loopback, which libfabric skips; None on a machine without a network."""
    found = run_quietly(["ip", "-json", "-4", "address", "show", "up"]) or "[]"
    for interface in json.loads(found):
        for address in interface.get("addr_info", []):
            if address.get("scope") == "global":
                return address["local"]
    return None


def libfabric_cases():
    address = network_address()
    if address is None:
        return
    for name, options in LIBFABRIC_VARIANTS:
        both = ("fi_pingpong", *options, "-c", "-I", "100")
        yield Case(f"rdma_cm/fi_pingpong/{name}", (*both, "-B", "{port}"), (*both, "-P", "{port}", "{addr}"),
                   check=prints("MB/sec" if "1" in options else "1m"), addr=address)


def cases():
    """Every case."""
    for some in (rping_cases, example_cases, perftest_cases, iperf_cases, libfabric_cases):
        yield from some()
