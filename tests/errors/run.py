"""Runs the combinations of `make errors`, both transports at the same time.

usage: run.py [PATTERN]    only those whose names contain PATTERN, such as `local`, `server_dereg` or one whole name
"""

import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def main():
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    command = [sys.executable, "-m", "unittest", "discover", "--start-directory", HERE]
    patterns = [f"*.{case}.*{wanted}*" for case in ("Udp", "Local")]
    running = [subprocess.Popen([*command, "-k", pattern], stderr=subprocess.PIPE, text=True) for pattern in patterns]
    reports = [process.communicate()[1] for process in running]
    print(*(report.lstrip(".\n") for report in reports), sep="", end="")
    if all("Ran 0 tests" in report for report in reports):
        sys.exit(f"no combination has {wanted!r} in its name")
    return max(process.returncode for process in running)


if __name__ == "__main__":
    sys.exit(main())
