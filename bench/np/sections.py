"""The plan of `make bench-np`: modes and sections."""

from dataclasses import dataclass, field

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Mode:
    """How the programs run."""

    name: str
    is_paged: bool = False
    is_file: bool = False
    options: tuple = ()
    env: dict = field(default_factory=dict, hash=False)

    def options_for(self, section, directory):
        """Options of `terrace run`."""
        if not self.is_paged:
            return self.options
        return ("--dram", str(section.budget_bytes), *(() if self.is_file else ("--swap", directory)), *self.options)

    def file_of(self, directory):
        return (f"{directory}/region",) if self.is_file else ()


COMMODITY = ("--nic", "commodity")
PIN = Mode("pin")
TERRACE = Mode("terrace", is_paged=True)
NP = Mode("np", is_paged=True, options=COMMODITY)
NP_USER = Mode("np-user", is_paged=True, options=COMMODITY, env={"TERRACE_NP_ACCESS": "two-sided"})
ODP = Mode("odp", is_paged=True, is_file=True, options=("--mode", "odp"))


@dataclass(frozen=True)
class Case:
    """A mode, and what the server's region has when it is registered."""

    mode: Mode
    content: str
    name: str


def case(mode, content="filled", name=""):
    return Case(mode, content, name or mode.name)


TOUCHED = "pin, touched before"


@dataclass(frozen=True)
class Section:
    """Cases that are measured together, in turns."""

    name: str
    figures: str  # of the paper
    test: str  # the client's; empty for a program without a client
    cases: tuple
    region_bytes: int = 0
    budget_bytes: int = 0
    paths: tuple = ("udp", "local")
    disk_turns: int = 0  # the turns of each client, if the disk is measured beside them
    regions: tuple = ()  # sizes and contents, for registrations
    fault_plan: str = ""  # beside this file


ALL = (case(PIN), case(TERRACE), case(NP), case(NP_USER), case(ODP))
UNTOUCHED = (case(PIN, name=TOUCHED), *(case(mode, "untouched") for mode in (PIN, TERRACE, NP, NP_USER, ODP)))
REGIONS = (*((size * GIB, "untouched") for size in (1, 16, 64)), (GIB, "filled"))

SECTIONS = (
    Section("buffers", "figure 1", "buffers", (case(PIN), case(TERRACE), case(NP)), 16 * MIB, 64 * MIB),
    Section("present", "figures 7 and 10", "present", ALL, 16 * MIB, 64 * MIB),
    Section("minor", "figures 8 and 9", "faults", UNTOUCHED, 256 * MIB, 512 * MIB),
    # The budget is a thirty-second of the region, so that a page that is chosen at random is not in memory. A client measures 12 latencies
    # and 6 rates, in 10 slices each.
    Section("major", "figures 8 and 9", "faults", ALL, 256 * MIB, 8 * MIB, disk_turns=180),
    Section("others", "section 3.3", "others", ALL[1:], 256 * MIB, 32 * MIB),
    # With a disk that takes a millisecond, the READs beside a fault are many, and its processor time is shared by all of them.
    Section("slow-others", "section 3.3", "others", ALL[1:], 256 * MIB, 32 * MIB, fault_plan="slow.toml"),
    Section("store", "section 6.2", "store", ALL, 256 * MIB, 64 * MIB),
    Section("registration", "table 2", "", (case(PIN), case(TERRACE), case(NP)), budget_bytes=2 * GIB, paths=("none",), regions=REGIONS),
    Section("control", "tables 1 and 2", "", (case(PIN), case(TERRACE), case(NP), case(NP_USER)), budget_bytes=64 * MIB, paths=("none",)),
)
