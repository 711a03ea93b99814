"""Real RDMA programs on Terrace. `make conformance` runs this; ONLY, an expression of pytest's -k, chooses cases by parts of their names.

Every case keeps its programs' output in results/conformance/RUN/CASE/.
"""

import os

import connections
import matrix
import pytest
import pyverbs_suite
import special

CASES = {case.name: case for case in matrix.all_cases()}
# A case limits its programs itself, and repeats some of them. Those of `make soak-term` take as long as one likes.
CASE_LIMIT_S = 900 + 3 * int(os.environ.get("TERRACE_STRESS_SECONDS", 0))
# The suite is one process, which runs for the first of its tests.
SUITE_LIMIT_S = 1800


@pytest.mark.skipif(connections.network_address() is None, reason="no address outside of the loopback: libfabric's cases are left out")
def test_libfabrics_cases_are_there():
    assert any(name.startswith("rdma_cm/fi_pingpong/") for name in CASES)


@pytest.mark.timeout(CASE_LIMIT_S)
@pytest.mark.parametrize("name", CASES)
def test_program(name, run_dir, conclude):
    conclude(CASES[name].run(run_dir / name))


@pytest.mark.timeout(CASE_LIMIT_S)
@pytest.mark.parametrize("name", special.SPECIAL)
def test_special(name, run_dir, conclude):
    conclude(special.run(name, special.SPECIAL[name], run_dir / name))


# Each process of pytest-xdist that has a test of the suite would run all of it.
of_the_suite = pytest.mark.xdist_group("pyverbs")


@pytest.fixture(scope="module")
def pyverbs(run_dir, request):
    """The results of rdma-core's own tests, by name: those that must pass, and all others."""
    outcomes = pyverbs_suite.run(run_dir / "pyverbs")
    if request.config.getoption("update_pyverbs_list"):
        pyverbs_suite.update_list(outcomes)
    return {result.name: result for result in pyverbs_suite.evaluate(outcomes, pyverbs_suite.passing_names())}


@of_the_suite
@pytest.mark.timeout(SUITE_LIMIT_S)
@pytest.mark.parametrize("name", [pyverbs_suite.PREFIX + name for name in pyverbs_suite.passing_names()])
def test_suite(name, pyverbs, conclude):
    conclude(pyverbs[name])


@of_the_suite
@pytest.mark.timeout(SUITE_LIMIT_S)
@pytest.mark.parametrize("name", [pyverbs_suite.PREFIX + "others"])
def test_suite_beyond_the_list(name, pyverbs, record_property):
    """Tests that are not in the list of those that pass: none fails, and each that is skipped has a reason in the list of those."""
    listed = {pyverbs_suite.PREFIX + listed for listed in pyverbs_suite.passing_names()}
    others = [result for other, result in pyverbs.items() if other not in listed]
    for status in ("passed", "skipped"):
        record_property(status, str(sum(result.status == status for result in others)))
    failed = [f"{result.name}: {result.reason}" for result in others if result.status == pyverbs_suite.FAILED]
    assert not failed, "\n".join(failed)
