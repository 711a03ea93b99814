"""The plan of `make bench-np`: modes and sections."""

from dataclasses import dataclass

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Mode:
    """How the programs run."""

    name: str
    is_paged: bool = False
    is_file: bool = False

    def options(self, section, directory):
        """Options of `terrace run`."""
        if not self.is_paged:
            return ()
        return ("--dram", str(section.budget_bytes), *(("--mode", "odp") if self.is_file else ("--swap", directory)))

    def file_of(self, directory):
        return (f"{directory}/region",) if self.is_file else ()


PIN, NP, ODP = Mode("pin"), Mode("np", is_paged=True), Mode("odp", is_paged=True, is_file=True)


@dataclass(frozen=True)
class Case:
    """A mode, and what the server's region has when it is registered."""

    mode: Mode
    content: str
    name: str


def case(mode, content="filled", name=""):
    return Case(mode, content, name or mode.name)


@dataclass(frozen=True)
class Section:
    """Cases that are measured together."""

    name: str
    test: str  # the client's; empty for a program without a client
    cases: tuple
    region_bytes: int = 0
    budget_bytes: int = 0
    paths: tuple = ("udp", "local")
    measures_disk: bool = False
    regions: tuple = ()  # sizes and contents, for a program without a client


UNTOUCHED = (case(PIN, name="pin, touched before"), case(PIN, "untouched"), case(NP, "untouched"), case(ODP, "untouched"))
REGIONS = (*((size * GIB, "untouched") for size in (1, 16, 64)), (GIB, "filled"))

SECTIONS = (
    Section("present", "present", (case(PIN), case(NP), case(ODP)), 64 * MIB, 256 * MIB),
    Section("minor", "first-touches", UNTOUCHED, 256 * MIB, 512 * MIB),
    # The budget is a thirty-second of the region, so that a page that is chosen at random is not in memory.
    Section("major", "absent", (case(NP), case(ODP)), 512 * MIB, 16 * MIB, measures_disk=True),
    Section("others", "others", (case(NP), case(ODP)), 512 * MIB, 64 * MIB),
    Section("registration", "", (case(PIN), case(NP)), budget_bytes=2 * GIB, paths=("none",), regions=REGIONS),
)
