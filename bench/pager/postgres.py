"""PostgreSQL as a program whose memory does not fit: transactions like TPC-B's beside sorts, both verified.

What is paged is the private memory of its processes, most of which sorts use. Shared buffers are shared memory.
"""

import contextlib
import glob
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time

USER = "postgres"
# The pager handles the faults of programs with CAP_SYS_PTRACE. This tree may be closed to other users.
CAPABILITIES = "+sys_ptrace,+dac_read_search"
# PostgreSQL refuses to run as root.
AS_USER = ("setpriv", "--reuid", USER, "--regid", USER, "--init-groups", "--inh-caps", CAPABILITIES, "--ambient-caps", CAPABILITIES)
CLIENTS = 2
TIMEOUT = 300
# A sort stays in memory, and in one process. What is written need not outlive the run.
SETTINGS = {"listen_addresses": "", "shared_buffers": "16MB", "work_mem": "1GB", "max_parallel_workers_per_gather": "0", "jit": "off",
            "autovacuum": "off", "fsync": "off"}

# Sorts the keys, compares each with the one before it, and their sum with that of the keys as they were made.
SORT = """
SELECT count(*), sum(hashtext(key)::bigint) = (SELECT sum(hashtext(md5(n::text))::bigint) FROM generate_series(1, {keys}) AS n),
       bool_and(previous IS NULL OR previous <= key)
FROM (SELECT key, lag(key) OVER (ORDER BY key) AS previous FROM (SELECT md5(n::text) AS key FROM generate_series(1, {keys}) AS n) AS made) AS sorted
"""
# What the transactions have added is the sum of all balances, by account, teller and branch.
SUMS = """
SELECT count(*), sum(delta), (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers),
       (SELECT sum(bbalance) FROM pgbench_branches) FROM pgbench_history
"""


def find(program):
    """The newest installed version's path: Debian has the server's programs outside of PATH."""
    paths = glob.glob(f"/usr/lib/postgresql/*/bin/{program}")
    return max(paths, key=lambda path: float(path.split("/")[4]), default=None) or shutil.which(program)


def processes(pid):
    """A process and all that it has started."""
    with contextlib.suppress(OSError):
        for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from processes(int(child))
    yield pid


def private_bytes(pid):
    """Private memory of a process and all that it has started; what they share counts once."""
    total = 0
    for process in processes(pid):
        with contextlib.suppress(OSError, TypeError):
            total += int(re.search(r"Pss_Anon:\s+(\d+)", pathlib.Path(f"/proc/{process}/smaps_rollup").read_text())[1]) * 1024
    return total


class Server:
    """A server in a directory of its own, whose command is run by `under`."""

    def __init__(self, directory, under):
        self.directory, self.under, self.process, self.most_bytes = directory, under, None, 0

    def __enter__(self):
        data = f"{self.directory}/data"
        self.call("initdb", "--no-sync", "--locale", "C", "--auth", "trust", "--username", USER, data)
        settings = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
        command = [*self.under, find("postgres"), "-D", data, "-k", self.directory, *settings]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while subprocess.run([find("pg_isready"), "-q", "-h", self.directory]).returncode != 0:
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.__exit__()
                raise subprocess.CalledProcessError(self.process.returncode or 1, command)
            time.sleep(0.05)
        return self

    def __exit__(self, *_):
        # The server ends its processes: first with their work, then without.
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
                return

    def call(self, program, *arguments):
        """Runs a program of PostgreSQL's, which has all of its memory."""
        return subprocess.run([*AS_USER, find(program), *arguments], check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout

    def query(self, text):
        return self.call("psql", "-h", self.directory, "-d", "postgres", "-v", "ON_ERROR_STOP=1", "-A", "-t", "-F", " ", "-c", text).split()

    def bench(self, *arguments):
        return self.call("pgbench", "-h", self.directory, "-n", *arguments, "postgres")

    def watch(self, is_over):
        while not is_over.wait(0.05):
            self.most_bytes = max(self.most_bytes, private_bytes(self.process.pid))


@contextlib.contextmanager
def beside(work, *arguments):
    """Runs a function in a thread meanwhile."""
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def load(server, keys, sorts, transactions):
    """Sorts beside transactions. Returns how long each took, and what the sorts have found."""
    found = {}

    def transact():
        began = time.monotonic()
        with contextlib.suppress(subprocess.SubprocessError):
            # What they have not done, the sums show.
            server.bench("-c", str(CLIENTS), "-t", str(transactions), "--random-seed", "7")
        found["transactions_seconds"] = time.monotonic() - began

    began = time.monotonic()
    with beside(transact):
        found["sorted"] = [server.query(SORT.format(keys=keys)) for _ in range(sorts)]
        found["sorts_seconds"] = time.monotonic() - began
    return {**found, "seconds": time.monotonic() - began}


def verify(found, sums, keys, transactions):
    """Raises ValueError unless keys are sorted and balances are the sum of what was added to them."""
    if any(each != [str(keys), "t", "t"] for each in found):
        raise ValueError(f"the sorts are wrong: {found}")
    count, *balances = sums
    if count != str(CLIENTS * transactions) or len(set(balances)) != 1:
        raise ValueError(f"{CLIENTS * transactions} transactions have these sums: {sums}")


def measure(keys, sorts, scale, transactions):
    """A function that runs the load on a server under a prefix."""

    def run(under):
        with tempfile.TemporaryDirectory() as directory:
            shutil.chown(directory, USER, USER)
            with Server(directory, under) as server:
                server.bench("-i", "-s", str(scale), "-q")
                is_over = threading.Event()
                with beside(server.watch, is_over):
                    try:
                        found = load(server, keys, sorts, transactions)
                    finally:
                        is_over.set()
                sums = server.query(SUMS)
                verify(found.pop("sorted"), sums, keys, transactions)
                return {**found, "result": " ".join(sums), "most_bytes": server.most_bytes}

    return run
