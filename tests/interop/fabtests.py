"""libfabric's own test programs over its verbs provider. `-v` compares every byte."""

import connections
from cases import Case
from harness import procs

PROGRAMS = procs.ROOT / "build/programs/libfabric-2.1.0/bin"
# The programs' default port, and that of programs that exchange their addresses over TCP first.
PORT, EXCHANGE_PORT = 9228, 3000
EXCHANGING = ("fi_av_xfer", "fi_multi_ep", "fi_multi_recv", "fi_rdm_tagged_peek", "fi_unexpected_msg")

# Provider -> tests. libfabric has no name for what is left out: its provider answers "No data available".
TESTS = {
    # Connected endpoints: rdma_cm and RC queue pairs.
    "verbs": [
        ("fi_cm_data",),
        ("fi_cq_data", "-e", "msg", "-o", "senddata"),
        ("fi_cq_data", "-e", "msg", "-o", "writedata"),
        ("fi_flood", "-e", "msg", "-v", "-T", "1"),
        ("fi_msg",),
        ("fi_msg_bw", "-I", "20", "-v"),
        ("fi_msg_epoll",),
        ("fi_msg_pingpong", "-I", "20", "-v"),
        ("fi_multi_ep", "-e", "msg", "-v", "-A", "-Q"),
        ("fi_rma_bw", "-e", "msg", "-o", "read", "-I", "20"),
        ("fi_rma_bw", "-e", "msg", "-o", "write", "-I", "20"),
        ("fi_rma_bw", "-e", "msg", "-o", "writedata", "-I", "20", "-v"),
        ("fi_shared_ctx", "-e", "msg", "--no-tx-shared-ctx"),
    ],
    # Reliable datagrams, which libfabric makes of connected endpoints.
    "verbs;ofi_rxm": [
        ("fi_av_xfer", "-e", "rdm"),
        ("fi_cq_data", "-e", "rdm", "-o", "senddata"),
        ("fi_cq_data", "-e", "rdm", "-o", "writedata"),
        ("fi_flood", "-e", "rdm", "-v", "-T", "1"),
        ("fi_inject_test", "-A", "inject", "-v"),
        ("fi_inject_test", "-N", "-A", "inj_complete", "-v"),
        ("fi_multi_ep", "-e", "rdm", "-v", "-A", "-Q"),
        ("fi_multi_recv", "-e", "rdm", "-I", "20", "-v"),
        ("fi_rdm",),
        ("fi_rdm_atomic", "-o", "all", "-I", "5", "-v"),
        ("fi_rdm_cntr_pingpong", "-I", "20", "-v"),
        ("fi_rdm_multi_client", "-C", "10", "-I", "5"),
        ("fi_rdm_pingpong", "-I", "20", "-v"),
        ("fi_rdm_tagged_bw", "-I", "20", "-v"),
        ("fi_rdm_tagged_peek",),
        ("fi_rdm_tagged_pingpong", "-I", "20", "-v"),
        ("fi_recv_cancel", "-e", "rdm", "-V"),
        ("fi_rma_bw", "-e", "rdm", "-o", "read", "-I", "20", "-v"),
        ("fi_rma_bw", "-e", "rdm", "-o", "write", "-I", "20", "-v"),
        ("fi_rma_bw", "-e", "rdm", "-o", "writedata", "-I", "20", "-v"),
        ("fi_unexpected_msg", "-e", "rdm", "-I", "10", "-v"),
    ],
}


def cases():
    """Every case, on a machine with an address that libfabric does not skip."""
    address = connections.network_address()
    if address is None:
        return
    for provider, tests in TESTS.items():
        for test in tests:
            yield case(provider, test, address)


def case(provider, test, address):
    program, *options = test
    both = (str(PROGRAMS / program), *options, "-p", provider, "-s", "{addr}")
    name = "-".join([program.removeprefix("fi_"), *(option.lstrip("-") for option in options)])
    return Case(f"published/fabtests/{provider.replace(';', '-')}/{name}", both, (*both, "{addr}"), addr=address,
                fixed_port=EXCHANGE_PORT if program in EXCHANGING else PORT)
