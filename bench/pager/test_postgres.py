"""Tests of what counts as a right result of PostgreSQL."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import postgres

SORTED = [["1000", "t", "t"]]
SUMS = ["40", "-17", "-17", "-17", "-17"]


def test_sorted_keys_and_equal_sums_are_right():
    postgres.verify(SORTED, SUMS, 1000, 20)


@pytest.mark.parametrize("found", [[["999", "t", "t"]], [["1000", "f", "t"]], [["1000", "t", "f"]], [["1000", "t", "t"], []]],
                         ids=["a key is missing", "a key is another one", "the order is wrong", "a sort has no result"])
def test_sorts_are_verified(found):
    with pytest.raises(ValueError, match="sorts are wrong"):
        postgres.verify(found, SUMS, 1000, 20)


@pytest.mark.parametrize("sums", [["39", *SUMS[1:]], [*SUMS[:2], "-16", *SUMS[3:]], [*SUMS[:4], "0"]],
                         ids=["a transaction is missing", "an account is wrong", "a branch is wrong"])
def test_balances_are_verified(sums):
    with pytest.raises(ValueError, match="transactions have these sums"):
        postgres.verify(SORTED, sums, 1000, 20)


def test_private_memory_is_that_of_a_process_and_its_children():
    child = subprocess.Popen([sys.executable, "-c", "kept = bytearray(64 << 20); print(flush=True); input()"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        assert child.pid in postgres.processes(os.getpid())
        assert 64 << 20 <= postgres.private_bytes(child.pid) < postgres.private_bytes(os.getpid())
    finally:
        child.kill()
        child.wait()


def test_an_error_is_not_hidden_by_a_server_that_fails():
    server = postgres.Server("/", [])
    server.process = subprocess.Popen(["false"])
    with pytest.raises(ValueError, match="wrong"), contextlib.ExitStack() as stack:
        stack.push(server.__exit__)
        raise ValueError("wrong")
