"""Shared by the tests of connections by address: a program on this side and one in the guest, one of which listens."""

import contextlib
import itertools

import peers
from harness import procs
from peers import KernelPeer

LIMIT_S = 30
TERRACE, RXE = "Terrace", "rxe"
# A program is alone at its address, or another process has the address's port 4791.
ALONE, SECOND = "alone", "second process"
PLACES = (ALONE, SECOND)

_ports = itertools.count(24000)


def fresh_port():
    """A port of rdma_cm that no program uses."""
    return next(_ports)


class Connecting(KernelPeer):
    """A test case whose programs connect by address. It stops them at its end."""

    @contextlib.contextmanager
    def address(self, place, family=4):
        """An address of this side: an unused one, or one whose port 4791 an unrelated process has."""
        if place == ALONE:
            yield peers.fresh_address(family)
            return
        first = self.host(family)
        self.assertEqual(first.stat()["slot"], 0)
        yield first.address
        first.stop()

    def run_pair(self, server, argv, address, port):
        """Runs a server and a client, one of them in the guest. Returns their outcomes."""
        return (self.host_serves if server == TERRACE else self.guest_serves)(argv, address, port)

    def host_program(self, argv, address, name):
        program = procs.Program(procs.under_terrace(argv, addr=address), peers.guest.log_dir / "connections", name)
        self.addCleanup(program.stop)
        return program

    def ended(self, program):
        stopped = program.wait(LIMIT_S) is None
        if stopped:
            program.stop(is_late=True)
        return program.outcome(stopped)

    def in_guest(self, argv):
        return contextlib.closing(peers.guest.start(" ".join(["timeout", str(LIMIT_S), *map(str, argv)])))

    def guest_outcome(self, session):
        status, out = session.end(LIMIT_S + 5)
        return procs.Outcome([session.command], status, out=out)

    def host_serves(self, argv, address, port):
        server = self.host_program(argv["server"], address, f"{port}-server")
        self.wait_for_host(server, port)
        with self.in_guest(argv["client"]) as session:
            client = self.guest_outcome(session)
        return {"client": client, "server": self.ended(server)}

    def wait_for_host(self, server, port):
        self.eventually(lambda: procs.is_listening(port) or server.wait(0.01) is not None, "a server listens on this side")

    def guest_serves(self, argv, address, port):
        with self.in_guest(argv["server"]) as session:
            listens = f"rdma resource show cm_id | grep LISTEN | grep -q ':{port}'"
            peers.guest.run(f"until {listens}; do usleep 20000; done")
            client = self.ended(self.host_program(argv["client"], address, f"{port}-client"))
            return {"client": client, "server": self.guest_outcome(session)}
