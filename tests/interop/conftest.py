"""The options and fixtures of conformance cases."""

import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "scripts")]

from harness import procs  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--update-pyverbs-list", action="store_true", help="write pyverbs-passing.txt from this run")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """The processes of pytest-xdist write into one folder."""
    shared = getattr(node.config, "terrace_run_dir", None) or procs.new_run_dir("conformance")
    node.config.terrace_run_dir = shared
    node.workerinput["run_dir"] = str(shared)


@pytest.fixture(scope="session")
def run_dir(request):
    """The folder of the programs' output, results/conformance/RUN."""
    if not procs.terrace_binary().exists():
        pytest.exit(f"{procs.terrace_binary()} is missing: run `make build`", returncode=1)
    shared = getattr(request.config, "workerinput", {}).get("run_dir")
    return pathlib.Path(shared) if shared else procs.new_run_dir("conformance")


@pytest.fixture
def conclude(record_property, run_dir):
    """A function that ends a test as a case's result says."""
    return lambda result: result.conclude(record_property, run_dir)
