"""Hostile peers against a live `terrace serve` and live verbs programs, while well-behaved peers continue to work.

`make chaos` builds what it needs and runs this; ONLY, an expression of pytest's -k, chooses attacks. The attacks of `attacks.py` run one by
one, then all at once; then the resources that they took must be free; then clients of the same host are stopped (`stops.py`).
"""

import contextlib
import pathlib
import resource
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "scripts"), str(HERE.parent / "negative")]

import attacks  # noqa: E402
import scene as scenes  # noqa: E402
import stops  # noqa: E402
from harness import procs  # noqa: E402
from harness.endpoint import PROGRAM  # noqa: E402

ATTACK_S, ALL_S = 2.5, 8


@pytest.fixture(scope="module")
def log_dir():
    for needed in (procs.terrace_binary(), PROGRAM):
        if not needed.exists():
            pytest.exit(f"{needed} is missing: run `make chaos`", returncode=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    return procs.new_run_dir("chaos")


@pytest.fixture(scope="module")
def fresh():
    """Addresses that no concurrent run uses."""
    return scenes.addresses()


@pytest.fixture(scope="module")
def scene(log_dir, fresh):
    """The attacked processes, at work before the first attack."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        # The attacks are on the network side: same-host streams would put no packets on the wire to replay. Programs that connect by
        # address choose their path by themselves; their connections' datagrams are on the network anyway.
        patch.setenv("TERRACE_PATH", "udp")
        scene = scenes.Scene(stack, fresh, log_dir)
        check(scene)
        yield scene
        stack.close()
        check(scene)


def check(scene):
    assert scene.new_failures() == []


def endure(scene, chosen, seconds, record_property):
    rates, reports = scenes.attack(scene, chosen, seconds)
    record_property("packets sent by attackers", ", ".join(str(report) for report in reports))
    for name, share in scenes.shares(scene, rates).items():
        record_property(f"rate of {name}, of that without attacks", share)
    check(scene)


@pytest.mark.parametrize("name", [one.__name__ for one in attacks.ATTACKS])
def test_attack(name, scene, record_property):
    endure(scene, [one for one in attacks.ATTACKS if one.__name__ == name], ATTACK_S, record_property)


def test_all_attacks_at_once(scene, record_property):
    endure(scene, attacks.ATTACKS, ALL_S, record_property)


def test_resources_are_freed(scene, record_property):
    scenes.expect_resources_freed(scene)
    scene.watch.over.set()
    for line in scenes.resource_use(scene):
        record_property(*line.split(": ", 1))
    check(scene)
    assert scene.node.paths[1].read_text() == ""


def test_stops(log_dir, fresh, record_property):
    """Clients of the same host that are stopped in the middle of an access."""
    failures = []
    record_property("stops", stops.run(fresh, log_dir, failures.append))
    assert failures == []
