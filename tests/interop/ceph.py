"""A Ceph cluster whose daemons and clients send messages by RDMA: one monitor, one OSD with its objects in memory, and `rados`."""

import contextlib
import json
import random
import time
import uuid

from cases import last_output
from harness import procs

ROOT = procs.ROOT / "build/programs/ceph"
LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/ceph", "lib/x86_64-linux-gnu")
MONITOR, OSD, CLIENT = "127.0.0.54", "127.0.0.55", "127.0.0.56"
MIB = 1 << 20
OBJECT_BYTES = 16 * MIB + 4097
LIMIT_S = 60

# `ms_async_rdma_*`: Ceph's defaults register more than 4 GiB of receive buffers in each process.
CONFIGURATION = """\
[global]
fsid = {fsid}
mon_host = [v2:{monitor}:{port}/0]
ms_type = async+rdma
ms_async_rdma_device_name = terrace0
ms_async_rdma_receive_buffers = 1024
ms_async_rdma_receive_queue_len = 256
ms_async_rdma_send_buffers = 256
ms_async_op_threads = 1
ms_bind_msgr1 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
run_dir = {dir}
log_file = {dir}/$name.log
plugin_dir = {root}/usr/lib/x86_64-linux-gnu/ceph
erasure_code_dir = {root}/usr/lib/x86_64-linux-gnu/ceph/erasure-code
osd_class_dir = {root}/usr/lib/x86_64-linux-gnu/rados-classes
mon_data = {dir}/mon
mon_allow_pool_size_one = true
mon_data_avail_crit = 0
mon_data_avail_warn = 0
osd_data = {dir}/osd
osd_objectstore = memstore
memstore_device_bytes = 268435456
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_crush_chooseleaf_type = 0
osd_pool_default_pg_autoscale_mode = off
"""


class Failed(Exception):
    """An error message."""


class Cluster:
    """Its programs and files. `environment` makes them find the unpacked libraries."""

    def __init__(self, log_dir, stack):
        self.log_dir, self.stack, self.fsid = log_dir, stack, str(uuid.uuid4())
        self.configuration = log_dir / "ceph.conf"
        self.port = procs.free_port()
        text = CONFIGURATION.format(fsid=self.fsid, monitor=MONITOR, port=self.port, dir=log_dir, root=ROOT)
        self.configuration.write_text(text)
        for name in ("mon", "osd"):
            (log_dir / name).mkdir()
        self.environment = {
            "LD_LIBRARY_PATH": ":".join(str(ROOT / path) for path in LIBRARIES),
            "PYTHONPATH": str(ROOT / "usr/lib/python3/dist-packages"),
        }

    def run(self, name, program, *arguments, addr=CLIENT):
        """Runs one of Ceph's programs to its end and returns its output."""
        outcome = procs.run_one(self._command(program, arguments, addr), self.log_dir, name, LIMIT_S, self.environment)
        if outcome.status != 0:
            raise Failed(f"{name} {outcome.verdict}: {last_output(outcome)}")
        return outcome.out

    def start(self, name, program, *arguments, addr):
        daemon = procs.Program(self._command(program, arguments, addr), self.log_dir, name, self.environment)
        self.stack.callback(daemon.stop)
        return daemon

    def _command(self, program, arguments, addr):
        path = ROOT / "usr/bin" / program
        interpreter = ("/usr/bin/python3",) if program == "ceph" else ()
        return procs.under_terrace([*interpreter, str(path), "--conf", str(self.configuration), *arguments], addr=addr)

    def start_monitor(self):
        monmap = str(self.log_dir / "monmap")
        self.run("monmaptool", "monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", f"[v2:{MONITOR}:{self.port}]", monmap)
        self.run("mon-mkfs", "ceph-mon", "--id", "a", "--mkfs", "--monmap", monmap, addr=MONITOR)
        self.monitor = self.start("mon-a", "ceph-mon", "--id", "a", "--foreground", addr=MONITOR)

    def start_osd(self):
        identity = str(uuid.uuid4())
        self.run("osd-new", "ceph", "osd", "new", identity)
        self.run("osd-mkfs", "ceph-osd", "--id", "0", "--mkfs", "--osd-uuid", identity, addr=OSD)
        self.osd = self.start("osd-0", "ceph-osd", "--id", "0", "--foreground", addr=OSD)
        deadline = time.monotonic() + LIMIT_S
        while "1 up" not in self.run("osd-stat", "ceph", "osd", "stat"):
            if self.osd.wait(0.2) is not None or time.monotonic() > deadline:
                raise Failed(f"the OSD is not up: {last_output(self.osd.outcome())}")


def objects(log_dir):
    """`rados` writes an object and reads the same bytes."""
    try:
        with contextlib.ExitStack() as stack:
            cluster = Cluster(log_dir, stack)
            cluster.start_monitor()
            cluster.start_osd()
            cluster.run("pool-create", "ceph", "osd", "pool", "create", "data", "8")
            check_queue_pairs(cluster)
            return compare_objects(cluster)
    except Failed as failed:
        return str(failed)


def check_queue_pairs(cluster):
    """The daemons talk to each other by queue pairs."""
    for daemon in (cluster.monitor, cluster.osd):
        stat = procs.run_one([str(procs.terrace_binary()), "stat", str(daemon.process.pid), "--json"], cluster.log_dir, "stat")
        if stat.status != 0 or not json.loads(stat.out)["devices"][0]["queue_pairs"]:
            raise Failed(f"{daemon.paths[0].stem} has no queue pair: {last_output(stat)}")


def compare_objects(cluster):
    written, read = cluster.log_dir / "written.bin", cluster.log_dir / "read.bin"
    data = random.Random(7).randbytes(OBJECT_BYTES)
    written.write_bytes(data)
    cluster.run("put", "rados", "--pool", "data", "put", "object", str(written))
    cluster.run("get", "rados", "--pool", "data", "get", "object", str(read))
    return None if read.read_bytes() == data else "the object that was read differs from the object that was written"


SPECIAL = {"published/ceph": objects}
