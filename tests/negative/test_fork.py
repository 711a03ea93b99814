"""Fork, signals and the dynamic linker's lock against the interposed functions of the C library: no child and no handler hangs.

The program fork_load.c prints the stack of a child that hangs. fork_allocate.c looks at memory whose addresses were those of
registered memory. `make fork` runs 2,000 forks and 4,000 allocations, this test fewer.
"""

import os
import subprocess
import unittest

from support import PROGRAMS, ROOT, TERRACE, NegativeTest, fresh_address, procs

FORKS = int(os.environ.get("TERRACE_FORKS", "200"))
PRELOADED = TERRACE.parents[1] / "lib/terrace/libibverbs.so.1"
GUARDED = PROGRAMS.parent / "libraries" / "guarded.so"
LIBRARY = PROGRAMS.parent / "libraries" / "waiting.so"
INTERPOSED = ROOT / "crates" / "ibverbs" / "interposed.txt"


class Fork(NegativeTest):
    def check(self, mode, argument, *options, timeout_s=120):
        self.run_program("fork_load", mode, str(argument), options=options, timeout_s=timeout_s)

    def run_program(self, name, *arguments, options, timeout_s, before=()):
        command = procs.under_terrace([*before, str(PROGRAMS / name), *arguments], *options, addr=fresh_address())
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        self.assertEqual(outcome.returncode, 0, outcome.stdout + outcome.stderr)

    def test_every_interposed_function_is_called(self):
        names = subprocess.run([PROGRAMS / "fork_load", "names"], capture_output=True, text=True, check=True).stdout
        lines = INTERPOSED.read_text().splitlines()
        self.assertEqual(names.splitlines(), [line for line in lines if not line.startswith("#")])

    def test_children_forked_while_threads_call_them(self):
        self.check("load", FORKS, timeout_s=60 + FORKS)

    def test_children_forked_while_threads_use_devices(self):
        self.check("verbs", FORKS, timeout_s=60 + FORKS)

    def test_children_without_fork_hooks(self):
        self.check("bare", FORKS // 2, timeout_s=60 + FORKS)

    def test_a_signal_handler_makes_the_first_call(self):
        self.check("signal", 2000)

    def test_a_signal_handler_forks(self):
        self.check("fork-in-signal", FORKS // 2, timeout_s=60 + FORKS)

    def test_a_child_of_vfork_resets_its_own_signals(self):
        self.check("vfork", 1)

    def test_blocks_at_the_addresses_of_registered_ones(self):
        for allocator in ("malloc", "mmap"):
            with self.subTest(allocator):
                arguments = (str(2 * FORKS), allocator)
                self.run_program("fork_allocate", *arguments, options=("--dram", "8M"), timeout_s=60 + FORKS)

    def test_blocks_of_another_allocator(self):
        before = ("env", f"LD_PRELOAD={PRELOADED}:{GUARDED}")
        self.run_program("fork_allocate", str(FORKS // 2), "malloc", options=("--dram", "8M"), timeout_s=60 + FORKS, before=before)

    def test_a_first_call_while_the_dynamic_linker_waits_for_it(self):
        self.check("constructor", LIBRARY)


if __name__ == "__main__":
    unittest.main()
