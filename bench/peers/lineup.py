"""The plan of `make bench-peers`: the peers and their programs, and the points."""

from dataclasses import dataclass, field

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Peer:
    """A program or interface to measure."""

    name: str
    title: str
    program: str  # below build/bench/peers
    flavour: str = ""
    memory: str = "private"  # of the target's region: `shared` or `private`
    path: str = ""  # for programs that run under `terrace run`: TERRACE_PATH
    store: str = ""  # the third-party program that is the target, if any
    ops: tuple = ("get", "put", "message", "atomic")
    kind: str = "other"  # terrace, limit (of the machine) or other
    alone: bool = False  # whether the peer has no target


def _terrace(interface, path, memory, ops=("get", "put", "message", "atomic")):
    title = f"Terrace {path}, {'native calls' if interface == 'calls' else interface}, {memory} memory"
    program = "verbs" if interface == "verbs" else "native"
    return Peer(f"terrace-{path}-{interface}-{memory}", title, program, flavour="calls" if interface == "calls" else path, memory=memory,
                path=path if program == "verbs" else "", ops=ops, kind="terrace")


ONE_SIDED = ("get", "put", "atomic")

PEERS = (
    _terrace("verbs", "local", "shared"),
    _terrace("native", "local", "shared"),
    # One-sided operations without work requests; messages always use work requests.
    _terrace("calls", "local", "shared", ONE_SIDED),
    # Messages do not depend on the kind of region.
    _terrace("verbs", "local", "private", ONE_SIDED),
    _terrace("native", "local", "private", ONE_SIDED),
    _terrace("verbs", "udp", "private"),
    _terrace("native", "udp", "private"),
    Peer("memcpy-shared", "memcpy, shared memory", "memcpy", memory="shared", ops=ONE_SIDED, kind="limit", alone=True),
    Peer("memcpy-private", "memcpy, private memory", "memcpy", ops=ONE_SIDED, kind="limit", alone=True),
    Peer("shm", "shared-memory ping-pong, pinned", "shm", ops=("message",), kind="limit"),
    Peer("udp", "bare UDP ping-pong", "udp", ops=("message",), kind="limit"),
    Peer("ucx-posix", "UCX posix", "ucx", flavour="posix,self"),
    Peer("ucx-sysv", "UCX sysv", "ucx", flavour="sysv,self"),
    # CMA has no messages and no connection setup; posix does both.
    Peer("ucx-cma", "UCX cma", "ucx", flavour="cma,posix,self"),
    Peer("ucx-tcp", "UCX tcp", "ucx", flavour="tcp,self"),
    Peer("fabric-shm", "libfabric shm", "fabric", flavour="shm", memory="shared"),
    Peer("fabric-tcp", "libfabric tcp", "fabric", flavour="tcp"),
    Peer("redis", "Redis, unix socket", "kv", flavour="redis", store="redis-server", ops=ONE_SIDED),
    Peer("memcached", "memcached, unix socket", "kv", flavour="memcached", store="memcached", ops=ONE_SIDED),
    Peer("nbd", "NBD (nbdkit memory), unix socket", "nbd", store="nbdkit", ops=("get", "put")),
)

# Every other peer is compared with this one.
REFERENCE = "terrace-local-verbs-shared"

SHAPES = ((1, 1), (16, 1), (16, 2))  # depth, threads


@dataclass(frozen=True)
class Section:
    """Points that are measured together, on regions of one size."""

    name: str
    region: int
    points: tuple  # (op, size, depth, threads)
    peers: tuple = field(default=())  # names; all when empty
    rounds_max: int = 100
    memory: str = ""  # of the target's region; the peer's when empty
    huge_pages: int = 0  # pages of 2 MiB that must be free

    def points_of(self, peer):
        return [point for point in self.points if point[0] in peer.ops]

    def peers_of(self, peers):
        return [peer for peer in peers if (not self.peers or peer.name in self.peers) and self.points_of(peer)]


def _points(sizes, message_sizes):
    points = [(op, size, *shape) for op in ("get", "put") for size in sizes for shape in SHAPES]
    points += [("message", size, *shape) for size in message_sizes for shape in SHAPES]
    return tuple(points + [("atomic", 8, *shape) for shape in SHAPES])


_AT_MEMORY_SPEED = tuple(peer.name for peer in PEERS if peer.name.startswith(("terrace-local", "memcpy")))

# A region that exceeds caches and TLB, and one that fits into them.
_LARGE_POINTS = tuple((op, 4096, depth, 1) for op in ("get", "put") for depth in (1, 16))
_HOT = Section("hot", MIB, (("get", 8, 1, 1), ("put", 8, 1, 1), ("get", 4096, 1, 1)), (*_AT_MEMORY_SPEED, "ucx-posix"))
# In huge pages, with shorter page walks. UCX's sysv allocates huge pages by itself if they are available.
_SHARED = tuple(name for name in _AT_MEMORY_SPEED if name.endswith("shared"))
_HUGE_POINTS = tuple((op, size, depth, 1) for op in ("get", "put") for size in (8, 4096) for depth in (1, 16))
_HUGE = Section("huge", 256 * MIB, _HUGE_POINTS, (*_SHARED, "ucx-sysv"), memory="huge", huge_pages=256)

SHORT = (Section("main", 256 * MIB, _points((8, 4096, MIB), (64, 4096))), Section("large", 2 * GIB, _LARGE_POINTS, _AT_MEMORY_SPEED, 1), _HUGE, _HOT)
_SIZES = (8, 64, 512, 4096, 65536, MIB)
FULL = (Section("main", 256 * MIB, _points(_SIZES, _SIZES)), Section("large", 2 * GIB, _LARGE_POINTS, _AT_MEMORY_SPEED, 3), _HUGE, _HOT)

SHORT_ROUNDS, SHORT_MILLISECONDS = 3, 30
FULL_ROUNDS, FULL_MILLISECONDS = 5, 150
