"""Unmodified programs with one end on Terrace and the other in the guest, on rxe."""

import contextlib
import itertools
import socket

import capture
import guest as machine
import peers
from cases import all_of, last_output, prints, prints_none, table_rows
from harness import procs
from peers import FAMILIES, KernelPeer

LIMIT_S = 20
# The exit status of a program ended by timeout(1).
TERMINATED = 143

# Bandwidth tests send few messages, because the guest's processor is emulated.
PERFTEST = [
    ("ib_read_bw", "-n", "50"),
    ("ib_read_bw", "-n", "10", "-m", "4096", "-s", "1000001"),
    ("ib_read_lat", "-n", "300"),
    ("ib_write_bw", "-n", "50"),
    ("ib_write_bw", "-n", "10", "-m", "4096", "-s", "1000001"),
    ("ib_write_lat", "-n", "300"),
    ("ib_write_lat", "-n", "300", "-c", "UC"),
    ("ib_send_bw", "-n", "50"),
    ("ib_send_bw", "-n", "50", "-b"),
    ("ib_send_bw", "-n", "50", "-q", "4"),
    ("ib_send_lat", "-n", "300"),
    ("ib_send_lat", "-n", "300", "-e"),
    ("ib_send_lat", "-n", "300", "-c", "UC"),
    ("ib_send_lat", "-n", "300", "-c", "UD"),
    ("ib_atomic_bw", "-n", "200"),
    ("ib_atomic_lat", "-n", "300"),
    ("ib_atomic_lat", "-n", "300", "-A", "CMP_AND_SWAP"),
]
PINGPONGS = [
    ("ibv_rc_pingpong", "-n", "300", "-c"),
    ("ibv_rc_pingpong", "-n", "300", "-c", "-m", "4096", "-s", "20000"),
    ("ibv_rc_pingpong", "-n", "300", "-c", "-e"),
    ("ibv_uc_pingpong", "-n", "300", "-c"),
    ("ibv_ud_pingpong", "-n", "300", "-c"),
]

_ports = itertools.count(20000)


class Programs(KernelPeer):
    def test_perftest(self):
        self.each_way(PERFTEST, table_rows(1), gid_option="-x", more=("-F",))

    def test_pingpongs(self):
        self.each_way(PINGPONGS, all_of(prints("bytes in"), prints_none("invalid data", "Failed status")), gid_option="-g")

    def each_way(self, programs, check, gid_option, more=()):
        for program, family, server in itertools.product(programs, FAMILIES, ("Terrace", "rxe")):
            with self.subTest(program=" ".join(program), family=family, server=server):
                port = next(_ports)
                host_argv = [*program, *more, gid_option, "0", "-p", str(port)]
                gid = peers.guest.gid_indexes[peers.guest_address(family)]
                guest_argv = [*self.of_guest(program), *more, "-d", "rxe0", gid_option, str(gid), "-p", str(port)]
                run = self.host_serves if server == "Terrace" else self.guest_serves
                outcomes = self.repeated(
                    lambda _attempt: run(host_argv, guest_argv, family, port),
                    lambda outcomes: self.is_waiting_for_sent_ack(server, outcomes) or self.has_no_clock(outcomes))
                for end, outcome in outcomes.items():
                    self.assertEqual(outcome.status, 0, f"{end}: {outcome.verdict}: {last_output(outcome)}")
                self.assertIsNone(check(outcomes))

    @staticmethod
    def of_guest(program):
        """perftest at the guest's end polls: with -e it expects one event for each completion, but rxe retransmits
        acknowledged requests by its timer, and then at times raises one event for two completions."""
        return [word for word in program if word != "-e" or program[0].startswith("ibv_")]

    def is_waiting_for_sent_ack(self, server, outcomes):
        """Whether a client on this side has completed and ended, while rxe waits for an ACK that was sent to it.

        rxe's timer also expires without a loss, and rxe drops an ACK that arrives just then. It then retransmits for
        ever to a queue pair that ended with its program. No other NIC at the client's end could answer either.
        """
        if server != "rxe" or outcomes["client"].status != 0 or outcomes["server"].status != TERMINATED:
            return None
        family = socket.AF_INET6 if ":" in self.host_address else socket.AF_INET
        ends = [socket.inet_pton(family, address) for address in (peers.guest_address(6 if ":" in self.host_address else 4),
                                                                  self.host_address)]
        return "rxe waited for an ACK that was sent to it" if capture.all_acknowledged(peers.guest.capture, *ends) else None

    @staticmethod
    def has_no_clock(outcomes):
        """Whether perftest could not calibrate the processor's cycle counter, as on an emulated processor: it prints
        that, and all of its results are zero."""
        found_none = any("Correlation coefficient" in outcome.text for outcome in outcomes.values())
        return "perftest could not calibrate the guest's clock" if found_none else None

    def host_program(self, argv, name, family):
        self.host_address = peers.fresh_address(family)
        command = procs.under_terrace(argv, addr=self.host_address)
        program = procs.Program(command, peers.guest.log_dir / "programs", name)
        self.addCleanup(program.stop)
        return program

    def ended(self, program):
        stopped = program.wait(LIMIT_S) is None
        if stopped:
            program.stop(is_late=True)
        return program.outcome(stopped)

    def guest_outcome(self, session):
        status, out = session.end(LIMIT_S + 5)
        return procs.Outcome([session.command], status, out=out)

    def host_serves(self, host_argv, guest_argv, family, port):
        server = self.host_program(host_argv, f"{port}-server", family)
        self.eventually(lambda: procs.is_listening(port), f"{host_argv[0]} listens on this side")
        command = " ".join(["timeout", str(LIMIT_S), *guest_argv, machine.host_ipv4(1)])
        with contextlib.closing(peers.guest.start(command)) as session:
            client = self.guest_outcome(session)
        return {"client": client, "server": self.ended(server)}

    def guest_serves(self, host_argv, guest_argv, family, port):
        with contextlib.closing(peers.guest.start(" ".join(["timeout", str(LIMIT_S), *guest_argv]))) as session:
            peers.guest.run(f"until grep -qE ':{port:04X} 0+:0000 0A' /proc/net/tcp /proc/net/tcp6; do usleep 20000; done")
            client = self.ended(self.host_program([*host_argv, machine.IPV4], f"{port}-client", family))
            return {"client": client, "server": self.guest_outcome(session)}
