"""`terrace swap-device --mount`: the file by FUSE, the loop device over it, its discards, its errors and its ends.

`tests/interop/swap` has a kernel that swaps to it.
"""

import contextlib
import ctypes
import errno
import os
import pathlib
import random
import shutil
import signal
import subprocess
import threading
import time
import unittest

from support import TERRACE, USAGE
from test_swap_device import LIMIT_S, PAGE, REFUSED, SwapDevice

MIB = 1 << 20
SIZE = 64 * MIB
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
LIBC = ctypes.CDLL(None, use_errno=True)
IS_ROOT = os.geteuid() == 0
STATUS = pathlib.Path("/proc/self/status").read_text()
HAS_SYS_RESOURCE = int(STATUS.split("CapEff:")[1].split()[0], 16) >> 24 & 1


def fallocate(fd, mode, offset, length):
    if LIBC.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def succeed(*argv):
    """The output of a program that has to succeed."""
    return subprocess.run(argv, stdin=subprocess.DEVNULL, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout.strip()


def is_mounted(path):
    return f" {path} fuse.terrace " in pathlib.Path("/proc/mounts").read_text()


@unittest.skipUnless(IS_ROOT and os.path.exists("/dev/fuse"), "needs root and /dev/fuse")
class SwapFile(SwapDevice):
    def setUp(self):
        super().setUp()
        self.mount_point = self.directory / "disk"
        self.mount_point.mkdir()
        self.addCleanup(subprocess.run, ["umount", "--lazy", self.mount_point], stderr=subprocess.DEVNULL)

    def device(self, *nodes, options=(), wrapper=()):
        arguments = ("swap-device", "--memory-node", ",".join(nodes), "--size", str(SIZE), "--mount", self.mount_point, *options)
        return self.start(*arguments, wrapper=wrapper)

    def end(self, process):
        """As for a socket. Without the capability, two warnings come first."""
        complaints = super().end(process).splitlines(keepends=True)
        return "".join(line for line in complaints if HAS_SYS_RESOURCE or "needs CAP_SYS_RESOURCE" not in line)

    def opened(self, flags=os.O_RDWR):
        """A descriptor of the file, which is closed at the end of the test at the latest."""
        fd = os.open(self.mount_point / "swap", flags)

        def close():
            with contextlib.suppress(OSError):
                os.close(fd)

        self.addCleanup(close)
        return fd

    def stored(self, listen):
        """Pages that the device has on a node."""
        return self.status(listen)["clients"][0]["pages"]

    def assert_refused_by(self, number, function, *arguments):
        with self.assertRaises(OSError) as caught:
            function(*arguments)
        self.assertEqual(caught.exception.errno, number, caught.exception)


class Files(SwapFile):
    def test_a_directory_with_one_file_of_the_devices_size(self):
        _, listen = self.node()
        device = self.device(listen)
        self.assertEqual(os.listdir(self.mount_point), ["swap"])
        path = self.mount_point / "swap"
        found = path.stat()
        self.assertEqual((found.st_size, found.st_mode & 0o7777, found.st_uid), (SIZE, 0o600, 0))
        self.assertEqual(os.statvfs(path).f_bsize, PAGE)
        self.assert_refused_by(errno.EPERM, os.truncate, path, 0)
        self.assert_refused_by(errno.ENOENT, os.stat, self.mount_point / "other")
        self.assertRaises(OSError, os.unlink, path)
        self.assertRaises(OSError, (self.mount_point / "other").write_bytes, b"")
        fd = self.opened()
        os.pwrite(fd, b"end", SIZE - 3)
        self.assertEqual(os.pread(fd, 100, SIZE - 4), b"\0end")
        self.assertEqual(os.pread(fd, 100, SIZE), b"")
        self.assert_refused_by(errno.ENOSPC, os.pwrite, fd, b"beyond", SIZE - 3)
        self.assert_refused_by(errno.EOPNOTSUPP, fallocate, fd, 0, 0, PAGE)
        os.fsync(fd)
        os.close(fd)
        self.assertEqual(self.stored(listen), 1)
        device.send_signal(signal.SIGUSR1)
        self.assertRegex(device.stdout.readline(), r"swap device: 0 connections, \d+ requests \(1 failed\), .* 1 in use")
        self.assertEqual(self.end(device), "")
        self.assertEqual(os.listdir(self.mount_point), [])

    def test_bytes_are_those_written_last_and_holes_are_zeros(self):
        _, listen = self.node("8M")
        self.device(listen)
        fd, space = self.opened(), 4 * MIB
        model, rng = bytearray(space), random.Random(7)
        for _ in range(400):
            offset = rng.randrange(space)
            length = min(rng.choice([1, 100, 512, PAGE, 3 * PAGE, MIB]), space - offset)
            kind = rng.choice(["write", "write", "read", PUNCH_HOLE, ZERO_RANGE])
            if kind == "write":
                model[offset:offset + length] = content = rng.randbytes(length)
                self.assertEqual(os.pwrite(fd, content, offset), length)
            elif kind == "read":
                self.assertEqual(os.pread(fd, length, offset), model[offset:offset + length])
            else:
                fallocate(fd, kind | KEEP_SIZE, offset, length)
                model[offset:offset + length] = bytes(length)
        self.assertEqual(os.pread(fd, space, 0), model)
        fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 0, 1 << 40)
        self.assertEqual(self.stored(listen), 0)
        self.assertEqual(os.pread(fd, space, 0), bytes(space))

    def test_writers_of_parts_of_one_page_lose_nothing(self):
        _, listen = self.node()
        self.device(listen)
        fd, part = self.opened(), PAGE // 8

        def write(index):
            for number in range(100):
                os.pwrite(fd, bytes([index * 16 + number % 16]) * part, index * part)

        threads = [threading.Thread(target=write, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        self.assertEqual(os.pread(fd, PAGE, 0), b"".join(bytes([index * 16 + 3]) * part for index in range(8)))

    def test_requests_take_no_memory_from_the_system(self):
        """A kernel that swaps to the file may have none. Each page that comes is a fault."""
        _, listen = self.node("64M")
        device = self.device(listen, options=("--path", "udp"))
        fd, status = self.opened(), pathlib.Path(f"/proc/{device.pid}/stat")

        def faults():
            return int(status.read_text().rsplit(")", 1)[1].split()[7])

        def use(index):
            rng = random.Random(index)
            for _ in range(50):
                length, offset = rng.choice([PAGE, 4 * PAGE, 32 * PAGE]), rng.randrange(SIZE // PAGE - 32) * PAGE
                os.pwrite(fd, bytes([index]) * length, offset) if rng.random() < 0.6 else os.pread(fd, length, offset)

        before = faults()
        threads = [threading.Thread(target=use, args=(index,)) for index in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        self.assertEqual(faults() - before, 0)

    def test_a_full_node_is_enospc(self):
        _, listen = self.node("1M")
        device = self.device(listen)
        fd = self.opened()
        os.pwrite(fd, b"a" * 200 * PAGE, 0)

        def fill():
            for page in range(200, 300):
                os.pwrite(fd, b"b" * PAGE, page * PAGE)

        self.assert_refused_by(errno.ENOSPC, fill)
        # What is stored can be stored anew.
        os.pwrite(fd, b"c", PAGE)
        self.assertEqual(os.pread(fd, 2, PAGE - 1), b"ac")
        os.close(fd)
        self.assertEqual(self.end(device).count("requests fail with ENOSPC"), 1)

    def test_a_lost_node_is_eio(self):
        node, listen = self.node()
        self.device(listen)
        fd = self.opened()
        os.pwrite(fd, b"a" * PAGE, 0)
        node.kill()
        self.assert_refused_by(errno.EIO, os.pread, fd, PAGE, 0)
        self.assert_refused_by(errno.EIO, os.pwrite, fd, b"b" * 5, 0)

    def test_a_mirror_goes_on_while_a_node_is_stopped(self):
        (first, first_listen), (_, second_listen) = self.node(), self.node()
        self.device(first_listen, second_listen, options=("--mirror", "2"))
        fd, content = self.opened(), os.urandom(64 * PAGE)
        os.pwrite(fd, content, 0)
        first.send_signal(signal.SIGSTOP)
        self.addCleanup(first.send_signal, signal.SIGCONT)
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)
        os.pwrite(fd, content[100:105], 100)
        self.assertEqual(os.pread(fd, len(content), 0), content)

    def test_a_stopped_device_is_waited_for(self):
        _, listen = self.node()
        device = self.device(listen)
        fd = self.opened()
        os.pwrite(fd, b"a", 0)
        device.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, device.pid, os.WSTOPPED)
        read = []
        thread = threading.Thread(target=lambda: read.append(os.pread(fd, 1, 0)))
        thread.start()
        device.send_signal(signal.SIGCONT)
        thread.join(LIMIT_S)
        self.assertEqual(read, [b"a"])


class Ends(SwapFile):
    def test_the_end_says_that_the_file_is_in_use(self):
        _, listen = self.node()
        device = self.device(listen)
        fd = self.opened()
        os.pwrite(fd, b"a" * PAGE, 0)
        self.assertRegex(self.end(device), r"disk/swap is in use, .*its bytes are lost: swapoff and losetup -d come before")
        self.assertFalse(is_mounted(self.mount_point))
        self.assertRaises(OSError, os.pread, fd, 1, 0)

    def test_the_end_does_not_wait_for_a_stopped_node(self):
        node, listen = self.node()
        device = self.device(listen)
        fd, errors = self.opened(), []
        os.pwrite(fd, b"a" * PAGE, 0)
        node.send_signal(signal.SIGSTOP)
        self.addCleanup(node.send_signal, signal.SIGCONT)
        os.waitid(os.P_PID, node.pid, os.WSTOPPED)

        def write(index):
            try:
                os.pwrite(fd, b"b" * 8 * PAGE, index * 8 * PAGE)
            except OSError as error:
                errors.append(error.errno)

        # More than the device has buffers for.
        threads = [threading.Thread(target=write, args=(index,)) for index in range(64)]
        for thread in threads:
            thread.start()
        self.assertIn("is in use", self.end(device))
        for thread in threads:
            thread.join(LIMIT_S)
        self.assertEqual(len(errors), len(threads), errors)

    def test_a_mount_that_a_killed_device_has_left_is_replaced(self):
        _, listen = self.node()
        device = self.device(listen)
        # The kernel has the attributes of the directory from now on.
        succeed("stat", self.mount_point)
        fd = self.opened()
        device.kill()
        device.wait(LIMIT_S)
        self.assertRaises(OSError, os.pread, fd, 1, 0)
        self.assert_refused_by(errno.ENOTCONN, os.listdir, self.mount_point)
        self.device(listen)
        self.assertEqual(os.listdir(self.mount_point), ["swap"])

    def test_unmounting_ends_the_command(self):
        _, listen = self.node()
        device = self.device(listen)
        succeed("umount", self.mount_point)
        self.assertEqual(device.wait(LIMIT_S), 0)

    def test_the_command_sleeps_until_its_end(self):
        _, listen = self.node()
        device = self.device(listen)

        def wakeups():
            return pathlib.Path(f"/proc/{device.pid}/status").read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0]

        time.sleep(0.2)
        before = wakeups()
        time.sleep(0.5)
        self.assertEqual(wakeups(), before)

    def test_the_process_is_never_swapped_out_or_killed_for_memory(self):
        _, listen = self.node()
        device = self.device(listen)
        process = pathlib.Path(f"/proc/{device.pid}")
        fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        self.assertGreater(int(fields["VmLck"].split()[0]), 16 << 10)
        self.assertEqual(fields["VmSwap"].split()[0], "0")
        if HAS_SYS_RESOURCE:
            self.assertEqual((process / "oom_score_adj").read_text().strip(), "-1000")

    @unittest.skipUnless(shutil.which("setpriv"), "needs setpriv")
    def test_a_process_without_the_right_says_so(self):
        _, listen = self.node()
        wrapper = ("setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource")
        complaints = SwapDevice.end(self, self.device(listen, wrapper=wrapper))
        self.assertIn("PR_SET_IO_FLUSHER needs CAP_SYS_RESOURCE", complaints)
        self.assertIn("oom_score_adj needs CAP_SYS_RESOURCE", complaints)


@unittest.skipUnless(shutil.which("losetup") and os.path.exists("/dev/loop-control"), "needs losetup and /dev/loop-control")
class LoopDevices(SwapFile):
    def loop(self, *options):
        """A loop device over the file, which is detached at the end of the test."""
        name = succeed("losetup", "--find", "--show", *options, self.mount_point / "swap")
        self.addCleanup(subprocess.run, ["losetup", "--detach", name], stderr=subprocess.DEVNULL)
        return name

    def test_contents_and_discards(self):
        for direct in ("on", "off"):
            with self.subTest(direct=direct):
                _, listen = self.node("32M")
                device = self.device(listen)
                name = self.loop(f"--direct-io={direct}")
                content = os.urandom(16 * MIB)
                (self.directory / "content").write_bytes(content)
                succeed("dd", f"if={self.directory}/content", f"of={name}", "bs=1M", "seek=8", "oflag=direct")
                succeed("dd", f"if={name}", f"of={self.directory}/found", "bs=64K", "skip=128", "count=256", "iflag=direct")
                self.assertEqual((self.directory / "found").read_bytes(), content)
                self.assertEqual(self.stored(listen), 4096)
                succeed("blkdiscard", "--offset", str(8 * MIB), "--length", str(4 * MIB), name)
                self.assertEqual(self.stored(listen), 3072)
                succeed("blkdiscard", name)
                self.assertEqual(self.stored(listen), 0)
                succeed("mkswap", name)
                succeed("losetup", "--detach", name)
                self.assertEqual(self.end(device), "")

    @unittest.skipUnless(shutil.which("fio"), "needs fio")
    def test_many_requests_in_flight(self):
        _, listen = self.node("64M")
        device = self.device(listen)
        name = self.loop("--direct-io=on")
        succeed("fio", "--name=swap", f"--filename={name}", "--direct=1", "--ioengine=libaio", "--iodepth=64", "--rw=randwrite",
                "--bsrange=512-256k", "--size=48M", "--verify=crc32c", "--verify_state_save=0", "--randseed=5")
        succeed("losetup", "--detach", name)
        self.assertEqual(self.end(device), "")

    def test_a_killed_device_is_eio(self):
        _, listen = self.node()
        device = self.device(listen)
        name = self.loop("--direct-io=on")
        succeed("dd", "if=/dev/zero", f"of={name}", "bs=1M", "count=1", "oflag=direct")
        device.kill()
        device.wait(LIMIT_S)
        outcome = subprocess.run(["dd", f"if={name}", "of=/dev/null", "bs=4K", "count=1", "iflag=direct"], capture_output=True,
                                 text=True, timeout=LIMIT_S)
        self.assertIn("Input/output error", outcome.stderr)
        succeed("losetup", "--detach", name)


class Refusals(SwapFile):
    def refused(self, said, *arguments, status=REFUSED, wrapper=()):
        argv = [*wrapper, TERRACE, "swap-device", "--memory-node", self.node()[1], "--size", "1M", *map(str, arguments)]
        outcome = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)
        self.assertEqual(outcome.returncode, status, outcome.stderr)
        self.assertIn(said, outcome.stderr)

    def test_a_device_is_a_socket_or_a_file(self):
        self.refused("--socket", status=USAGE)
        self.refused("cannot be used with", "--socket", self.socket, "--mount", self.mount_point, status=USAGE)

    def test_mount_points(self):
        self.refused("cannot mount at", "--mount", self.directory / "nowhere")
        (self.directory / "file").write_text("mine")
        self.refused("cannot mount at", "--mount", self.directory / "file")
        hidden = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev && exec "$@"', "sh")
        self.refused("there is no /dev/fuse: modprobe fuse", "--mount", self.mount_point, wrapper=hidden)

    @unittest.skipUnless(shutil.which("setpriv"), "needs setpriv")
    def test_memory_that_may_not_be_locked(self):
        wrapper = ("prlimit", "--memlock=8388608:8388608", "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")
        self.refused("now 8192 KiB", "--mount", self.mount_point, wrapper=wrapper)
        self.assertFalse(is_mounted(self.mount_point))


if __name__ == "__main__":
    unittest.main()
