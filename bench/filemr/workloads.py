#!/usr/bin/env python3
"""The workloads of table 5 of the FileMR paper, of the same kinds and smaller. Each runs in a directory of its own.

    workloads.py fileserver|varmail|sqlite DIRECTORY [--scale X]

Redis runs as its own server: see `redis`."""

import argparse
import os
import pathlib
import random
import socket
import sqlite3
import subprocess
import time

IO_BYTES = 1 << 20


def fileserver(directory, scale):
    """As filebench's fileserver: files are created, appended to, read whole and deleted."""
    rng, count = random.Random(1), int(300 * scale)
    files = []

    def create():
        path = directory / f"file-{len(files)}-{rng.getrandbits(32)}"
        write(path, int(rng.gammavariate(1.5, 2.0 * IO_BYTES)) + 4096, "wb")
        return path

    for _ in range(count):
        files.append(create())
    for _ in range(3 * count):
        append_to, to_read, to_delete = rng.sample(range(count), 3)
        write(files[append_to], rng.randrange(1, 32 << 10), "ab")
        read(files[to_read])
        retire(files[to_delete])
        files[to_delete] = create()


def varmail(directory, scale):
    """As filebench's varmail: small files, written and appended to with fsync, read and deleted."""
    rng, count = random.Random(2), int(2000 * scale)
    mails, number = [], 0

    def create():
        nonlocal number
        number += 1
        path = directory / f"mail-{number}"
        write(path, int(rng.gammavariate(1.5, 7500)) + 1, "wb", sync=rng.random() < 0.1)
        return path

    for _ in range(count):
        mails.append(create())
    for _ in range(2 * count):
        replaced, read_only, appended = rng.sample(range(count), 3)
        retire(mails[replaced])
        mails[replaced] = create()
        read(mails[read_only])
        read(mails[appended])
        write(mails[appended], rng.randrange(1, 16 << 10), "ab", sync=rng.random() < 0.1)


def sqlite(directory, scale):
    """As MobiBench: rows are inserted and updated, a transaction each, with a write-ahead log."""
    rng, count = random.Random(3), int(60_000 * scale)
    database = sqlite3.connect(directory / "database", isolation_level=None)
    database.executescript("pragma journal_mode = wal; pragma synchronous = normal; create table t (id integer primary key, key integer, data blob)")
    database.execute("create index by_key on t (key)")
    for first in range(0, count, 1000):
        database.execute("begin")
        rows = ((row, rng.getrandbits(40), rng.randbytes(400)) for row in range(first, first + 1000))
        database.executemany("insert into t values (?, ?, ?)", rows)
        database.execute("commit")
    for _ in range(count // 4):
        database.execute("update t set data = ?, key = ? where id = ?", (rng.randbytes(400), rng.getrandbits(40), rng.randrange(count)))
        database.execute("select data from t where id = ?", (rng.randrange(count),)).fetchone()
    database.close()


def write(path, length, mode, sync=False):
    with open(path, mode, buffering=0) as file:
        for start in range(0, length, IO_BYTES):
            file.write(bytes(min(IO_BYTES, length - start)))
        if sync:
            os.fdatasync(file)


def read(path):
    with open(path, "rb", buffering=0) as file:
        while file.read(IO_BYTES):
            pass


def retire(path):
    """Deletes a file for the workload. It stays under another name until the trace has been replayed, which needs its layout."""
    path.rename(path.parent / f"deleted-{path.name}")


def redis(directory, scale, start):
    """Redis with an append-only file, under load, with a rewrite and a snapshot. `start` starts the server's command."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    server = start(["redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", str(directory), "--appendonly", "yes", "--save", "",
                    "--appendfsync", "everysec"])

    def cli(*words):
        return subprocess.run(["redis-cli", "-p", port, *words], capture_output=True, text=True, timeout=60, check=False).stdout

    try:
        deadline = time.monotonic() + 20
        while "PONG" not in cli("ping"):
            if time.monotonic() > deadline or server.poll() is not None:
                raise SystemExit("redis-server did not start")
            time.sleep(0.1)
        requests = str(int(150_000 * scale))
        subprocess.run(["redis-benchmark", "-p", port, "-t", "set", "-n", requests, "-r", requests, "-d", "256", "-q"],
                       stdout=subprocess.DEVNULL, timeout=300, check=True)
        for command, field in (("bgrewriteaof", "aof_rewrite_in_progress:0"), ("bgsave", "rdb_bgsave_in_progress:0")):
            cli(command)
            deadline = time.monotonic() + 60
            while field not in cli("info", "persistence"):
                if time.monotonic() > deadline:
                    raise SystemExit(f"redis-server: {command} did not end")
                time.sleep(0.1)
    finally:
        cli("shutdown", "nosave")
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


PROGRAMS = {"fileserver": fileserver, "varmail": varmail, "sqlite": sqlite}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=PROGRAMS)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--scale", type=float, default=1.0, help="size, relative to the default")
    options = parser.parse_args()
    PROGRAMS[options.workload](options.directory, options.scale)


if __name__ == "__main__":
    main()
