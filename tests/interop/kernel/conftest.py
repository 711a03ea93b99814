"""pytest in the network namespace that run.py makes: the network, the guest, and the folder of what is kept."""

import os
import pathlib
import sys
import time

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "scripts"), str(HERE.parents[1] / "negative"), str(HERE.parent)]

import guest as machine  # noqa: E402
import guests  # noqa: E402
import image  # noqa: E402
import peers  # noqa: E402
import run  # noqa: E402
from harness import procs  # noqa: E402

TEST_LIMIT_S = 900


def pytest_configure(config):
    if config.option.collectonly:
        return
    if run.INSIDE not in os.environ:
        pytest.exit("the tests need a network namespace of their own: tests/interop/kernel/run.py, or `make interop`", returncode=2)
    run_dir = procs.new_run_dir("interop")
    machine.create_network()

    def start_guest():
        if peers.guest is not None:
            peers.guest.close()
        started = time.monotonic()
        try:
            peers.guest = machine.Guest(run_dir)
        except (machine.GuestError, image.Incomplete) as error:
            pytest.exit(f"interop: {error}", returncode=1)
        plugin.lines.append(f"the guest was up in {time.monotonic() - started:.1f} s; logs in {run_dir}")

    plugin = guests.Guests(start_guest)
    config.pluginmanager.register(plugin)


def pytest_collection_modifyitems(items):
    """A test is many programs, in a guest without KVM. The programs have limits of their own."""
    for item in items:
        item.add_marker(pytest.mark.timeout(TEST_LIMIT_S))
