"""The conformance matrix: programs and their options. The data is followed by the rules that expand it."""

import pathlib

import connections
import offload
from cases import Case, all_of, prints, prints_none, table_rows

# ---- perftest ------------------------------------------------------------------------------------------------------------

# Tool -> services that it can use.
PERFTEST_SERVICES = {
    "ib_read_lat": ["RC", "XRC"],
    "ib_read_bw": ["RC", "XRC"],
    "ib_write_lat": ["RC", "UC", "XRC"],
    "ib_write_bw": ["RC", "UC", "XRC"],
    "ib_send_lat": ["RC", "UC", "UD", "XRC"],
    "ib_send_bw": ["RC", "UC", "UD", "XRC"],
    "ib_atomic_lat": ["RC", "XRC"],
    "ib_atomic_bw": ["RC", "XRC"],
}

RELIABLE = ("RC", "XRC")

SIZES_ALL = 23  # 2 bytes to 8 MiB, the powers of two
SIZES_ALL_UD = 12  # up to the path MTU of 4096

# Variant -> options, number of result rows, and the (tool, service) pairs that have it.
PERFTEST_VARIANTS = [
    ("default", [], 1, lambda tool, service: True),
    # Tools for latency measure the processor's clock for a quarter of a second for each size.
    ("all-sizes", ["-a", "-n", "200"], None,
     lambda tool, service: "atomic" not in tool and (tool.endswith("_bw") or service == "RC") and (service != "XRC" or tool in ("ib_send_bw", "ib_write_bw"))),
    ("events", ["-e", "-n", "500"], 1, lambda tool, service: "write" not in tool),
    ("8-qps", ["-q", "8", "-n", "500"], 1, lambda tool, service: tool.endswith("_bw")),
    ("srq", ["--use-srq"], 1, lambda tool, service: "send" in tool and service == "RC"),
    ("srq-8-qps", ["--use-srq", "-q", "8"], 1, lambda tool, service: tool == "ib_send_bw" and service == "RC"),
    # perftest does not support atomics with on-demand paging.
    ("odp", ["--odp"], 1, lambda tool, service: service in RELIABLE and "atomic" not in tool),
    ("odp-ud", ["--odp"], 1, lambda tool, service: service == "UD"),
    ("inline", ["-I", "128", "-s", "128"], 1, lambda tool, service: "send" in tool or "write" in tool),
    ("bidirectional", ["-b"], 1, lambda tool, service: tool.endswith("_bw")),
    ("post-list", ["-l", "16", "-n", "1600"], 1, lambda tool, service: tool.endswith("_bw") and service == "RC"),
    ("cq-moderation", ["-Q", "50", "-n", "1000"], 1, lambda tool, service: tool.endswith("_bw") and service == "RC"),
    ("old-post-send", ["--use_old_post_send"], 1, lambda tool, service: service in RELIABLE),
    ("compare-swap", ["-A", "CMP_AND_SWAP"], 1, lambda tool, service: "atomic" in tool),
    ("outstanding-1", ["-o", "1"], 1, lambda tool, service: tool in ("ib_read_bw", "ib_atomic_bw")),
    ("mtu-256", ["-m", "256", "-s", "5000"], 1, lambda tool, service: "atomic" not in tool and service != "UD"),
    ("mtu-4096", ["-m", "4096", "-s", "1000001", "-n", "300"], 1, lambda tool, service: tool.endswith("_bw") and "atomic" not in tool and service != "UD"),
    ("8-mib", ["-s", "8388608", "-n", "50"], 1, lambda tool, service: "atomic" not in tool and service != "UD"),
]


# Loss, duplication, reordering and corruption at once: RC must deliver all data.
LOSSY_PLAN = str(pathlib.Path(__file__).resolve().parent / "lossy.toml")


def perftest_cases():
    for tool, services in PERFTEST_SERVICES.items():
        for service in services:
            for variant, options, rows, applies in PERFTEST_VARIANTS:
                if applies(tool, service):
                    rows = rows or (SIZES_ALL_UD if service == "UD" else SIZES_ALL)
                    loses = {} if service in RELIABLE else {"is_unreliable": True, "timeout_s": 60}
                    yield perftest_case(f"perftest/{tool}/{service}/{variant}", tool, ["-c", service, *options], rows, **loses)
    for tool in ("ib_send_bw", "ib_write_bw", "ib_read_bw", "ib_atomic_bw"):
        for service in RELIABLE:
            options = ["-c", service, "-n", "500"]
            yield perftest_case(f"perftest/{tool}/{service}/lossy", tool, options, 1, run_options=("--fault-plan", LOSSY_PLAN))
    yield perftest_case("perftest/ib_write_bw/RC/ipv6", "ib_write_bw", ["--ipv6"], 1, addr="::1")
    yield perftest_case("perftest/ib_send_bw/RC/duration", "ib_send_bw", ["-D", "1"], 1)
    yield perftest_case("perftest/ib_send_bw/RC/terrace-mtu-1024", "ib_send_bw", [], 1, run_options=("--mtu", "1024"))


def perftest_case(name, tool, options, rows, timeout_s=90, **more):
    server = (tool, "-F", "-p", "{port}", *options)
    return Case(name, server, (*server, "{host}"), check=table_rows(rows), timeout_s=timeout_s, **more)


# ---- pingpongs -----------------------------------------------------------------------------------------------------------

# Program -> variants: name, options of both ends.
PINGPONGS = {
    "ibv_rc_pingpong": [
        ("default", []),
        ("validate", ["-c"]),
        ("events", ["-e", "-c"]),
        ("timestamp", ["-t"]),
        ("odp", ["-o", "-c"]),
        ("implicit-odp", ["-o", "-O", "-c"]),
        ("prefetch", ["-o", "-P", "-c"]),
        ("new-send", ["-N", "-c"]),
        ("new-send-timestamp", ["-N", "-t"]),
        ("mtu-256", ["-m", "256", "-c"]),
        ("mtu-4096", ["-m", "4096", "-c"]),
        ("one-byte", ["-s", "1", "-c"]),
        ("large", ["-s", "1048576", "-n", "100", "-c"]),
        ("rx-depth-1", ["-r", "1", "-n", "100", "-c"]),
    ],
    "ibv_uc_pingpong": [
        ("default", []),
        ("validate", ["-c"]),
        ("events", ["-e", "-c"]),
        ("mtu-4096", ["-m", "4096", "-s", "100000", "-n", "200", "-c"]),
    ],
    "ibv_ud_pingpong": [
        ("default", []),
        ("validate", ["-c"]),
        ("events", ["-e", "-c"]),
        ("small", ["-s", "1", "-c"]),
    ],
    "ibv_srq_pingpong": [
        ("default", []),
        ("validate", ["-c", "-n", "200"]),
        ("events", ["-e", "-n", "200"]),
        ("odp", ["-o", "-n", "200"]),
        ("one-qp", ["-q", "1"]),
    ],
    "ibv_xsrq_pingpong": [
        ("default", []),
        ("events", ["-e"]),
        ("odp", ["-o"]),
        ("large", ["-s", "100000", "-n", "100"]),
        ("mtu-4096", ["-m", "4096"]),
    ],
}


def pingpong_cases():
    for program, variants in PINGPONGS.items():
        for variant, options in variants:
            yield pingpong_case(f"pingpong/{program}/{variant}", program, options)
    yield pingpong_case("pingpong/ibv_rc_pingpong/ipv6", "ibv_rc_pingpong", ["-c"], addr="::1")
    yield pingpong_case("pingpong/ibv_ud_pingpong/ipv6", "ibv_ud_pingpong", ["-c"], addr="::1")


def pingpong_case(name, program, options, **more):
    server = (program, "-g", "0", "-p", "{port}", *options)
    says = "success" if program == "ibv_xsrq_pingpong" else "bytes in"
    check = all_of(prints(says), prints_none("invalid data", "Failed status"))
    return Case(name, server, (*server, "{host}"), check=check, **more)


# ---- qperf ---------------------------------------------------------------------------------------------------------------

QPERF_TESTS = {
    "rc": ["rc_bi_bw", "rc_bw", "rc_lat", "rc_rdma_read_bw", "rc_rdma_read_lat", "rc_rdma_write_bw", "rc_rdma_write_lat",
           "rc_rdma_write_poll_lat", "rc_compare_swap_mr", "rc_fetch_add_mr", "ver_rc_compare_swap", "ver_rc_fetch_add"],
    "uc": ["uc_bi_bw", "uc_bw", "uc_lat", "uc_rdma_write_bw", "uc_rdma_write_lat", "uc_rdma_write_poll_lat"],
    "ud": ["ud_bi_bw", "ud_bw", "ud_lat"],
}


def qperf_cases():
    for service, tests in QPERF_TESTS.items():
        for test in tests:
            yield qperf_case(f"qperf/{service}/{test}", test, [])
    yield qperf_case("qperf/rc/rc_bw-waiting", "rc_bw", ["-cp", "0"])
    yield qperf_case("qperf/rc/rc_rdma_read_bw-1-at-a-time", "rc_rdma_read_bw", ["-nr", "1"])


def qperf_case(name, test, options):
    client = ("qperf", "-lp", "{port}", "{host}", "-t", "1", *options, test)
    check = all_of(prints(test + ":"), prints_none("failed", "error"))
    return Case(name, ("qperf", "-lp", "{port}"), client, check=check, is_server_permanent=True)


# ---- UCX -----------------------------------------------------------------------------------------------------------------

# Below: UCT, the transports themselves. Test -> data layouts.
UCT_TESTS = {
    "rc_verbs": [("am_lat", ["short", "bcopy", "zcopy"]), ("am_bw", ["short", "bcopy", "zcopy"]),
                 ("put_lat", ["short", "bcopy", "zcopy"]), ("put_bw", ["short", "bcopy", "zcopy"]), ("get", ["bcopy", "zcopy"]),
                 ("fadd", ["short"]), ("add_lat", ["short"]), ("add_mr", ["short"]), ("cswap", ["short"])],
    "ud_verbs": [("am_lat", ["short", "bcopy", "zcopy"]), ("am_bw", ["short", "bcopy", "zcopy"])],
}

# Above: UCP, the protocols that choose among them by size. UCX's alias for each transport, which includes its
# auxiliary transports.
UCP_NAMES = {"rc_verbs": "rc_v", "ud_verbs": "ud_v"}
UCP_TESTS = [("tag_lat", "8"), ("tag_bw", "65536"), ("tag_bw", "4194304"), ("ucp_put_bw", "65536"), ("ucp_get", "65536"),
             ("stream_bw", "65536"), ("ucp_am_bw", "8192"), ("tag_sync_lat", "8"), ("tag_sync_bw", "65536"),
             ("ucp_put_lat", "8"), ("ucp_add", "8"), ("ucp_fadd", "8"), ("ucp_swap", "8"), ("ucp_cswap", "8"), ("ucp_fadd", "4"),
             ("stream_lat", "8"), ("ucp_am_lat", "8"), ("ucp_am_bw", "1048576")]

# Variant -> test, size, options.
UCP_VARIANTS = [
    ("iov", "tag_bw", "4096,8192,1,65536", ["-D", "iov,iov"]),
    ("iov-to-contig", "tag_lat", "100,3000", ["-D", "iov,contig"]),
    ("unexpected", "tag_bw", "65536", ["-U"]),
    ("wild-card", "tag_lat", "8", ["-C"]),
    ("threads", "tag_bw", "4096", ["-T", "3", "-M", "multi"]),
    ("sleeping", "tag_lat", "8", ["-E", "sleep"]),
    ("error-handling", "tag_bw", "1048576", ["-e"]),
    ("preregistered", "ucp_put_bw", "65536", ["-z"]),
    ("am-header", "ucp_am_bw", "8192", ["-H", "32"]),
    ("stream-data", "stream_bw", "65536", ["-r", "recv_data"]),
    ("outstanding", "ucp_get", "65536", ["-O", "32"]),
    ("passive-responder", "ucp_get", "65536", ["-o"]),
]

UCX_QUIET = {"UCX_WARN_UNUSED_ENV_VARS": "n"}


def ucx_cases():
    for transport, tests in UCT_TESTS.items():
        for test, layouts in tests:
            for layout in layouts:
                size = "2048" if layout != "short" and "lat" not in test else "8"
                options = ["-d", "terrace0:1", "-x", transport, "-D", layout, "-s", size]
                yield ucx_case(f"ucx/{transport}/{test}-{layout}", test, options, UCX_QUIET)
    for transport in UCT_TESTS:
        env = {**UCX_QUIET, "UCX_TLS": UCP_NAMES[transport], "UCX_NET_DEVICES": "terrace0:1"}
        for test, size in UCP_TESTS:
            yield ucx_case(f"ucx/{transport}/{test}-{size}", test, ["-s", size], env)
        for variant, test, size, options in UCP_VARIANTS if transport == "rc_verbs" else UCP_VARIANTS[:1]:
            yield ucx_case(f"ucx/{transport}/{variant}", test, ["-s", size, *options], env)


def ucx_case(name, test, options, env):
    iterations = "100" if {"1048576", "4194304"} & set(options) else "2000"
    server = ("ucx_perftest", "-t", test, "-p", "{port}", "-n", iterations, "-w", "100", *options)
    check = all_of(prints("Final:"), prints_none(" ERROR "))
    return Case(name, server, ("ucx_perftest", "{host}", *server[1:]), check=check, env=env)


# ---- MPI -----------------------------------------------------------------------------------------------------------------

# Open MPI with three processes that communicate by verbs alone, chosen by UCX or by libfabric. libfabric's verbs provider
# skips addresses of the loopback.
MPI_CHECK = str(pathlib.Path(__file__).resolve().parents[2] / "build/interop/programs/mpi_check")
MPIRUN = ("mpirun", "--oversubscribe", "-np", "3", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo")
MPI_ENV = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpi_cases():
    ucx = ("--mca", "pml", "ucx", "--mca", "osc", "ucx", "-x", "UCX_NET_DEVICES=terrace0:1", "-x")
    for transport in UCT_TESTS:
        yield mpi_case(f"mpi/ucx/{transport}", (*ucx, f"UCX_TLS={UCP_NAMES[transport]},self"))
    yield mpi_case("mpi/ucx/lossy", (*ucx, f"UCX_TLS={UCP_NAMES['rc_verbs']},self"), rounds="1",
                   run_options=("--fault-plan", LOSSY_PLAN))
    address = connections.network_address()
    if address is not None:
        ofi = ("--mca", "pml", "cm", "--mca", "mtl", "ofi", "--mca", "mtl_ofi_provider_include", "verbs;ofi_rxm")
        yield mpi_case("mpi/libfabric", ofi, addr=address)


def mpi_case(name, options, rounds="3", **more):
    return Case(name, single=(*MPIRUN, *options, MPI_CHECK, rounds), check=prints("3 ranks, all right", end="program"), env=MPI_ENV,
                timeout_s=120, **more)


# ---- device properties ----------------------------------------------------------------------------------------------------


def device_cases():
    yield Case("device/ibv_devices", single=("ibv_devices",), check=prints("terrace0", end="program"))
    yield Case("device/ibv_devinfo", single=("ibv_devinfo", "-v"),
               check=prints("terrace0", "PORT_ACTIVE", "Ethernet", "GID[  0]", "RoCE v2", end="program"))
    yield Case("device/ucx_info", single=("ucx_info", "-d"),
               check=all_of(prints("rc_verbs", "ud_verbs", end="program"), prints_none(" ERROR ")))


def all_cases():
    """Every case except pyverbs' suite and those of `special`, which are not run as `Case`s."""
    for cases in (device_cases, pingpong_cases, perftest_cases, qperf_cases, ucx_cases, mpi_cases, connections.cases, offload.cases):
        yield from cases()
