"""Programs and providers of every release of rdma-core load: each private version node, bound by its name.

Providers (libmlx5-rdmav59.so, ...) and rdma-core's own programs bind symbols of one private node. ld.so ends a program whose node is missing.
"""

import collections
import pathlib
import subprocess
import tempfile

from support import TERRACE, NegativeTest, fresh_address, procs

LIST = pathlib.Path(__file__).with_name("libibverbs-private.txt")
OURS = TERRACE.parents[1] / "lib/terrace/libibverbs.so.1"

# Both are linked with this library, which defines the symbols and is not there at run time.
STUB = """
{definitions}
void *ibv_get_device_list(int *count) {{ return count; }}
char *ibv_get_device_name(void *device) {{ return device; }}
"""
MAP = """
IBVERBS_1.1 {{ global: ibv_get_device_list; ibv_get_device_name; local: *; }};
{node} {{ global: {names}; }};
"""
# Counts the symbols whose library is Terrace's.
BOUND = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
{declarations}
static void *const symbols[] = {{ {addresses} }};
static int count_bound(void) {{
    int count = 0;
    for (unsigned i = 0; i < sizeof symbols / sizeof *symbols; i++) {{
        Dl_info found;
        count += dladdr(symbols[i], &found) && strcmp(found.dli_fname, "{ours}") == 0;
    }}
    return count;
}}
"""
# As rdma-core's PROVIDER_DRIVER does, the constructor registers the driver.
PROVIDER = BOUND + """
static const char operations[512];
__attribute__((constructor)) static void load(void) {{ ((void (*)(const void *))verbs_register_driver_{number})(operations); }}
int provider_bound(void) {{ return count_bound(); }}
"""
PROGRAM = BOUND + """
#include <stdio.h>
void **ibv_get_device_list(int *);
char *ibv_get_device_name(void *);
int provider_bound(void);
int main(void) {{
    void **devices = ibv_get_device_list(NULL);
    return printf("%s %d %d\\n", ibv_get_device_name(devices[0]), count_bound(), provider_bound()) < 0;
}}
"""


def nodes():
    """node -> its symbols."""
    found = collections.defaultdict(list)
    for line in LIST.read_text().splitlines():
        if not line.startswith("#"):
            name, node = line.split()
            found[node].append(name)
    return found


class PrivateNodes(NegativeTest):
    def setUp(self):
        self.directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def compile(self, source, text, output, *options):
        (self.directory / source).write_text(text)
        command = ["gcc", "-w", "-fPIC", "-Wl,-z,now", "-o", output, source, *options]
        built = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, timeout=60)
        self.assertEqual(built.returncode, 0, built.stderr)

    def needed_of(self, output):
        command = ["readelf", "--version-info", "--wide", self.directory / output]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def test_a_program_and_a_provider_of_each_node_start(self):
        found = nodes()
        self.assertEqual(sorted(found), [f"IBVERBS_PRIVATE_{number}" for number in (34, 57, 59, 64, 65)])
        for node, names in found.items():
            with self.subTest(node=node):
                words = {
                    "node": node, "number": node.rpartition("_")[2], "ours": OURS, "names": "; ".join(names),
                    "definitions": "\n".join(f"void {name}(void) {{}}" for name in names),
                    "declarations": "\n".join(f"extern char {name}[];" for name in names), "addresses": ", ".join(names),
                }
                (self.directory / "stub.map").write_text(MAP.format(**words))
                self.compile("stub.c", STUB.format(**words), "libibverbs.so.1", "-shared", "-Wl,--version-script=stub.map",
                             "-Wl,-soname,libibverbs.so.1")
                self.compile("provider.c", PROVIDER.format(**words), "libtest-rdmav.so", "-shared", "-Wl,-soname,libtest-rdmav.so",
                             "libibverbs.so.1")
                self.compile("program.c", PROGRAM.format(**words), "program", "-Wl,-rpath,$ORIGIN", "./libtest-rdmav.so", "libibverbs.so.1")
                for output in ("libtest-rdmav.so", "program"):
                    self.assertIn(f"Name: {node}", self.needed_of(output))
                (self.directory / "libibverbs.so.1").unlink()
                command = procs.under_terrace([str(self.directory / "program")], addr=fresh_address())
                outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
                self.assertEqual((outcome.returncode, outcome.stderr), (0, ""))
                self.assertEqual(outcome.stdout, f"terrace0 {len(names)} {len(names)}\n")
