#!/usr/bin/env python3
"""Runs pytest in a network namespace of its own: Terrace against the Linux kernel's Soft-RoCE (rdma_rxe), in a guest under QEMU.

    run.py [OPTIONS OF PYTEST]     such as: -k Loss

pytest's own hooks come too late for that: it has opened its output, and the namespace is made for a new process. Exit status 0 when nothing
failed, and, with a printed reason, when this machine cannot run the tests; with TERRACE_MUST_RUN in the environment that is a failure.
Output, the guest's console and the captures of failed tests are kept in results/interop/RUN/.
"""

import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TUN = pathlib.Path("/dev/net/tun")
# Set in the process within the namespace.
INSIDE = "TERRACE_INTEROP_INSIDE"


def main():
    reason = reason_to_skip()
    if reason:
        print(f"interop: 0 passed, 0 failed, all skipped: {reason}")
        return 1 if os.environ.get("TERRACE_MUST_RUN") else 0
    subprocess.run(["make", "--no-print-directory", "interop-programs"], cwd=ROOT, check=True)
    # Failures of parts of a test (subTest) end the test, so that it can be repeated as a whole.
    pytest = [str(ROOT / "build/tools/bin/pytest"), "-p", "no:subtests", str(HERE), *sys.argv[1:]]
    os.execvpe("unshare", [*unshare(), *pytest], {**os.environ, INSIDE: "1"})


def unshare():
    """The argv prefix that runs a command in separate namespaces, so that no interface of this machine changes."""
    return ["unshare", "--net", "--mount", *(["--map-root-user"] if os.geteuid() != 0 else [])]


def reason_to_skip():
    """The reason why this machine cannot run the tests, or None."""
    if not TUN.exists():
        return f"{TUN} is missing, so a guest cannot have a network (modprobe tun; in a container: --device {TUN})"
    setup = subprocess.run([ROOT / "scripts/setup.sh", "interop"], stdout=sys.stdout, stderr=subprocess.PIPE, text=True)
    if setup.returncode != 0:
        if shutil.which("qemu-system-x86_64") is None:
            return f"QEMU cannot be installed: {setup.stderr.strip()}"
        sys.exit(setup.stderr.strip())
    namespace = subprocess.run([*unshare(), "mount", "-t", "sysfs", "sysfs", "/sys"], capture_output=True, text=True)
    return None if namespace.returncode == 0 else f"no network namespace: {namespace.stderr.strip()}"


if __name__ == "__main__":
    sys.exit(main())
