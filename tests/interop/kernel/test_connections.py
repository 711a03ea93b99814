"""Connections by address (rdma_cm) between librdmacm on Terrace and librdmacm on the guest's kernel, in both directions.

The kernel knows nothing of slots: it sends every packet to port 4791 of an address. So a tested program is either alone
at its address and has that port, or is second, behind a process that has the port and forwards packets to it.
"""

import itertools

import guest as machine
from cases import all_of, last_output, prints, prints_none, table_rows
from connecting import ALONE, SECOND, PLACES, RXE, TERRACE, Connecting, fresh_port
from harness import procs
from peers import FAMILIES, guest_address

RPING = ("rping", "-C", "5", "-v", "-V")
RPING_OK = all_of(prints("rdma-ping-4:"), prints_none("data mismatch", "error"))
PERFTEST = [
    ("ib_read_bw", "-n", "50", "-R", "-F"),
    ("ib_write_bw", "-n", "50", "-R", "-F"),
    ("ib_send_lat", "-n", "100", "-R", "-F"),
]
# The program's fixed port.
UDADDY_PORT = 7174

TALK = procs.ROOT / "build/interop/programs/cm_talk"
INVALID_SERVICE, CONSUMER_DEFINED = 8, 28


def event(name, status=0, data=""):
    """A line of cm_talk."""
    return f'RDMA_CM_EVENT_{name} status {status} data "{data}"'


RESOLVED = [event("ADDR_RESOLVED"), event("ROUTE_RESOLVED")]


class Programs(Connecting):
    def test_rping(self):
        for family, server, place in itertools.product(FAMILIES, (TERRACE, RXE), PLACES):
            self.one(RPING, ("-s", "-a"), ("-c", "-a"), RPING_OK, server, place, family)
        for server in (TERRACE, RXE):
            self.one((*RPING, "-S", "65000"), ("-s", "-a"), ("-c", "-a"), RPING_OK, server, ALONE)

    def test_ucmatose(self):
        for server, place in itertools.product((TERRACE, RXE), PLACES):
            self.one(("ucmatose", "-c", "5", "-C", "5"), ("-b",), ("-s",), prints("return status 0"), server, place)

    def test_udaddy(self):
        for server, place in itertools.product((TERRACE, RXE), PLACES):
            self.one(("udaddy", "-c", "2", "-C", "5"), ("-b",), ("-s",), prints("return status 0"), server, place, port=UDADDY_PORT)

    def test_perftest(self):
        for program, server in itertools.product(PERFTEST, (TERRACE, RXE)):
            self.one(program, (), (), table_rows(1), server, ALONE)
        for server in (TERRACE, RXE):
            self.one(PERFTEST[0], (), (), table_rows(1), server, SECOND)

    def one(self, both, server_words, client_words, check, server, place, family=4, port=None):
        """Runs a program against itself, one end in the guest. Port and address of the server are added to the
        words."""
        with self.subTest(program=" ".join(both), family=family, server=server, place=place):
            def run(_attempt):
                with self.address(place, family) as address:
                    return self.run_pair(server, *self.commands(both, server_words, client_words, server, address, port))

            outcomes = self.repeated(run, lambda outcomes: None if check(outcomes) else self.failed_at_its_end(outcomes))
            for end, outcome in outcomes.items():
                self.assertEqual(outcome.status, 0, f"{end}: {outcome.verdict}: {last_output(outcome)}")
            self.assertIsNone(check(outcomes))

    @staticmethod
    def failed_at_its_end(outcomes):
        """Whether rping has closed the channel that its second thread reads, and so failed after all messages were
        exchanged: github.com/linux-rdma/rdma-core/pull/1622, which Debian 12 does not have."""
        failed = any("rdma_get_cm_event: Bad file descriptor" in outcome.text for outcome in outcomes.values())
        return "rping closed its channel before it had stopped reading there (rdma-core pull request 1622)" if failed else None

    def commands(self, both, server_words, client_words, server, address, port):
        """Both command lines, the address on this side, and the port."""
        words = [] if port else ["-p", str(fresh_port())]
        target = address if server == TERRACE else guest_address(self.family_of(address))
        # A server without server words takes no address.
        where = [*server_words, target] if server_words else []
        argv = {"server": [*both, *words, *where], "client": [*both, *words, *client_words, target]}
        return argv, address, port or int(words[1])

    @staticmethod
    def family_of(address):
        return 6 if ":" in address else 4


class Events(Connecting):
    """The events that programs get, with status and private data."""

    def test_a_client_disconnects(self):
        self.each("accept", "leave",
                  [event("ESTABLISHED", data="welcome"), event("DISCONNECTED")],
                  [event("CONNECT_REQUEST", data="leave"), event("ESTABLISHED"), event("DISCONNECTED")])

    def test_a_server_disconnects(self):
        self.each("accept", "stay",
                  [event("ESTABLISHED", data="welcome"), event("DISCONNECTED")],
                  [event("CONNECT_REQUEST", data="stay"), event("ESTABLISHED"), event("DISCONNECTED")])

    def test_a_server_rejects(self):
        self.each("reject", "leave",
                  [event("REJECTED", CONSUMER_DEFINED, "not you")], [event("CONNECT_REQUEST", data="leave")])

    def each(self, answer, manner, client_says, server_says):
        for server, place in itertools.product((TERRACE, RXE), PLACES):
            with self.subTest(server=server, place=place), self.address(place) as address:
                target, port = address if server == TERRACE else machine.IPV4, fresh_port()
                here, there = str(TALK), TALK.name
                programs = (here, there) if server == TERRACE else (there, here)
                argv = {"server": [programs[0], "server", target, str(port), answer, "1"],
                        "client": [programs[1], "client", target, str(port), manner]}
                outcomes = self.run_pair(server, argv, address, port)
                said = {end: outcome.out.splitlines() for end, outcome in outcomes.items()}
                self.assertEqual(said["client"], [*RESOLVED, *client_says])
                self.assertEqual(said["server"], ["listening", *server_says])

    def test_no_listener(self):
        words = [TALK.name, "client"]
        with self.subTest(asks=RXE):
            somebody = self.host()
            with self.in_guest([*words, somebody.address, fresh_port(), "leave"]) as session:
                outcome = self.guest_outcome(session)
            self.assertEqual(outcome.out.splitlines(), [*RESOLVED, event("REJECTED", INVALID_SERVICE)])
        for place in PLACES:
            with self.subTest(asks=TERRACE, place=place), self.address(place) as address:
                argv = [str(TALK), "client", machine.IPV4, str(fresh_port()), "leave"]
                outcome = self.ended(self.host_program(argv, address, f"nobody-{address}"))
                self.assertEqual(outcome.out.splitlines(), [*RESOLVED, event("REJECTED", INVALID_SERVICE)])


class PortTakeover(Connecting):
    """Programs continue after the process that has port 4791 of their address has ended."""

    def test_another_process_takes_over_the_port(self):
        first, port = self.host(), fresh_port()
        server = self.host_program([*RPING, "-s", "-P", "-p", port], first.address, f"{port}-server")
        self.wait_for_host(server, port)
        self.ping(first.address, port)
        first.kill()
        self.eventually(lambda: self.has_port(first.address), "the server has the port")
        self.ping(first.address, port)
        # A program that starts now and listens works, too.
        second_port = fresh_port()
        second = self.host_program([*RPING, "-s", "-P", "-p", second_port], first.address, f"{second_port}-server")
        self.wait_for_host(second, second_port)
        self.ping(first.address, second_port)

    def ping(self, address, port):
        with self.in_guest([*RPING, "-c", "-a", address, "-p", port]) as session:
            outcome = self.guest_outcome(session)
        self.assertEqual(outcome.status, 0, last_output(outcome))
        self.assertIsNone(RPING_OK({"client": outcome}))

    @staticmethod
    def has_port(address):
        """Whether a process has port 4791 of an address."""
        number = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
        with open("/proc/net/udp") as lines:
            return any(line.split()[1] == f"{number}:{4791:04X}" for line in list(lines)[1:])
