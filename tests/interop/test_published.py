"""Programs from PyPI and crates.io on Terrace. `make conformance-programs` installs them and runs this."""

import connections
import published
import pytest
import special

CASES = {case.name: case for case in published.all_cases()}
CASE_LIMIT_S = 900


@pytest.mark.skipif(connections.network_address() is None, reason="no address outside of the loopback: fabtests are left out")
def test_fabtests_are_there():
    assert any(name.startswith("published/fabtests/") for name in CASES)


@pytest.mark.timeout(CASE_LIMIT_S)
@pytest.mark.parametrize("name", CASES)
def test_program(name, run_dir, conclude):
    conclude(CASES[name].run(run_dir / name))


@pytest.mark.timeout(CASE_LIMIT_S)
@pytest.mark.parametrize("name", published.SPECIAL)
def test_special(name, run_dir, conclude):
    conclude(special.run(name, published.SPECIAL[name], run_dir / name))
