"""Programs whose work the NIC does by work queues in memory (docs/managed-queues.md), compiled with Terrace's own header."""

from cases import Case, all_verify, prints
from harness import procs

CONDITION = str(procs.ROOT / "build/examples/condition")
BROADCAST = str(procs.ROOT / "build/interop/programs/offloaded_broadcast")
RANKS = 4


def cases():
    """A condition as RedN builds it: an atomic rewrites a posted work request, which is then enabled."""
    for value, stored in (("7", "1"), ("8", "0")):
        yield Case(f"offload/condition-{value}", single=(CONDITION, value), check=prints(f"has stored {stored}", end="program"))


def broadcast(log_dir):
    """A collective as PCX posts it: the ranks between the ends sleep while their NICs forward every message."""
    numbers = log_dir / "numbers"
    numbers.mkdir()
    return all_verify(log_dir, {f"rank-{rank}": [BROADCAST, str(rank), str(RANKS), str(numbers)] for rank in range(RANKS)})


SPECIAL = {"offload/broadcast": broadcast}
