"""A guest kernel under memory pressure swaps to memory nodes: by `terrace swap-device` on this host, whose socket is the guest's disk
(NBD), or in the guest, whose file is below a loop device (FUSE).

A program in the guest uses more memory than the guest has, and verifies it. With two copies of each page, a memory node
is killed and started again meanwhile, and then the other one. The guest is emulated (TCG), so it is small.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types
import zlib

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "kernel"), str(HERE.parents[2] / "scripts"), str(HERE.parent)]

import image  # noqa: E402
from harness import procs  # noqa: E402

GUEST_MIB, PROGRAM_MIB, DEVICE_MIB = 96, 64, 128
# With the device's process and its locked memory in the guest.
FILE_GUEST_MIB, SMALL_FILE_GUEST_MIB, FILE_NODE_MIB = 384, 235, 256
PROGRAM = procs.ROOT / "build/interop/programs/swap_pattern"
LIMIT_S = 600
# A loaded machine emulates slowly.
pytestmark = pytest.mark.timeout(2 * LIMIT_S)
READY_LIMIT_S = 30


class Command:
    """A command of Terrace that runs in the background, and has printed its first line."""

    def __init__(self, log_path, *argv, wrapper=()):
        self.log = open(log_path, "w+")
        argv = [*wrapper, str(procs.terrace_binary()), *map(str, argv)]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + READY_LIMIT_S
        while "\n" not in self.output():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.02)
        assert not self.output().startswith("terrace: "), self.output()

    def output(self):
        return pathlib.Path(self.log.name).read_text()

    def end(self, number=signal.SIGTERM):
        """Sends a signal, and returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(30)
        self.log.close()
        return status


class Guest:
    def __init__(self, directory, memory_mib, files, words, *options, wrapper=()):
        self.console_path = directory / "console.log"
        argv = [*wrapper, "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", str(memory_mib), "-nodefaults",
                "-no-user-config", "-display", "none", "-no-reboot", "-kernel", image.kernel(), "-initrd",
                initramfs(directory, files), "-append", f"console=ttyS0 panic=-1 oops=panic {words}", "-serial",
                f"file:{self.console_path}", *options]
        self.log = open(directory / "qemu.log", "w")
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    def console(self):
        return self.console_path.read_text(errors="replace") if self.console_path.exists() else ""

    def wait_for(self, text):
        deadline = time.monotonic() + LIMIT_S
        while text not in self.console():
            assert self.process.poll() is None, self.console()[-2000:]
            assert time.monotonic() < deadline, f"no {text!r}: {self.console()[-2000:]}"
            time.sleep(0.1)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


def guest_with_disk(directory, socket, passes):
    """A guest whose disk is a device of this host."""
    return Guest(directory, GUEST_MIB, modules("virtio_pci", "virtio_blk"), f"terrace.mib={PROGRAM_MIB} terrace.passes={passes}",
                 "-blockdev", f"driver=nbd,node-name=swap,server.type=unix,server.path={socket},discard=unmap",
                 "-device", "virtio-blk-pci,drive=swap")


def guest_with_file(directory, network, listen, words, memory_mib=FILE_GUEST_MIB):
    """A guest that runs the device, whose memory node is on this host."""
    binary = directory / "terrace"
    # Files of an initramfs are in memory.
    subprocess.run(["strip", "-o", binary, procs.terrace_binary()], check=True)
    files = image.programs([binary, image.program("losetup"), image.program("chrt")])
    files.update(modules("virtio_pci", "virtio_net", "fuse", "loop"))
    words = f"terrace.node={listen} {words}"
    return Guest(directory, memory_mib, files, words, "-netdev", f"tap,id=net,ifname={network.tap},script=no,downscript=no",
                 "-device", "virtio-net-pci,netdev=net,romfile=,host_mtu=9000", wrapper=network.wrapper)


def modules(*names):
    return image.modules([(name, "boot") for name in names])


def initramfs(directory, files):
    """busybox, the program, and what else the guest needs."""
    files = {"init": (0o100755, (HERE / "init.sh").read_bytes()),
             "bin/busybox": (0o100755, image.BUSYBOX.read_bytes()),
             "bin/swap_pattern": (0o100755, PROGRAM.read_bytes()), **files}
    path = directory / "initramfs.gz"
    compressor = zlib.compressobj(level=1, wbits=31)
    path.write_bytes(compressor.compress(image.archive(files)) + compressor.flush())
    return path


@pytest.fixture
def start(request, tmp_path):
    """Starts commands, which end with the test."""
    commands = []

    def start_command(*argv, wrapper=()):
        commands.append(Command(tmp_path / f"command-{len(commands)}.log", *argv, wrapper=wrapper))
        request.addfinalizer(commands[-1].end)
        return commands[-1]

    return start_command


@pytest.fixture
def start_node(start):
    def start_node(port, address=f"127.{os.getpid() % 200 + 20}.7.{{}}"):
        listen = f"{address.format(port % 250 + 1)}:{port}"
        return start("memory-node", "--memory", f"{DEVICE_MIB}M", "--listen", listen), listen

    return start_node


def swap_device(start, directory, nodes, *options):
    socket = directory / "swap"
    device = start("swap-device", "--memory-node", ",".join(nodes), "--size", f"{DEVICE_MIB}M", "--socket", socket, *options)
    return device, socket


def check_end(guest):
    """The program has verified all of its memory, most of which was swapped out and in."""
    guest.wait_for("init: end")
    console = guest.console()
    assert "init: exit status 0" in console and "init: swap is off" in console, console[-2000:]
    counts = dict(re.findall(r"(pswpin|pswpout) (\d+)", console))
    assert int(counts["pswpin"]) > 5_000 and int(counts["pswpout"]) > 5_000, counts


def test_a_guest_swaps_to_a_memory_node(request, start, start_node, tmp_path):
    _, listen = start_node(7474)
    device, socket = swap_device(start, tmp_path, [listen])
    guest = guest_with_disk(tmp_path, socket, passes=2)
    request.addfinalizer(guest.end)
    check_end(guest)
    device.process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + READY_LIMIT_S
    while "swap device: " not in device.output():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert " 0 failed" in device.output().replace("(", " "), device.output()
    assert device.end() == 0


def wait_for_output(command, text):
    deadline = time.monotonic() + LIMIT_S
    while text not in command.output():
        assert command.process.poll() is None and time.monotonic() < deadline, f"no {text!r}: {command.output()}"
        time.sleep(0.05)


def test_a_guest_goes_on_when_each_of_two_memory_nodes_has_been_killed(request, start, start_node, tmp_path):
    """The first one is started again, and has a copy of each page when the second one is killed."""
    (first, first_listen), (second, second_listen) = start_node(7474), start_node(7475)
    device, socket = swap_device(start, tmp_path, [first_listen, second_listen], "--mirror", "2")
    guest = guest_with_disk(tmp_path, socket, passes=4)
    request.addfinalizer(guest.end)
    guest.wait_for("pass 1: verified")
    first.end(signal.SIGKILL)
    guest.wait_for("pass 2: written")
    start_node(7474)
    wait_for_output(device, "have two copies again")
    assert "pass 4: verified" not in guest.console(), "the program has ended before the second node"
    second.end(signal.SIGKILL)
    check_end(guest)
    output = device.output()
    assert output.count("a memory node is lost") == 2 and output.count("a memory node is used again") == 1, output
    assert device.end() == 0


@pytest.fixture
def network():
    """A network namespace with a tap device, and the argv prefix that runs a program in it."""
    if not pathlib.Path("/dev/net/tun").exists():
        pytest.skip("no /dev/net/tun, so a guest cannot have a network")
    tap, setup = "tap0", "ip link set lo up && ip tuntap add tap0 mode tap && ip link set tap0 mtu 9000 up"
    setup += " && ip address add 192.0.2.1/24 dev tap0 && echo ready && exec sleep infinity"
    is_root = os.geteuid() == 0
    argv = ["unshare", "--net", *([] if is_root else ["--map-root-user"]), "sh", "-c", setup]
    holder = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        line = holder.stdout.readline()
        if line != "ready\n":
            pytest.skip(f"no network namespace: {line.strip()}")
        inside = ["--net"] if is_root else ["--net", "--user", "--preserve-credentials"]
        yield types.SimpleNamespace(tap=tap, wrapper=["nsenter", "--target", str(holder.pid), *inside, "--"])
    finally:
        holder.kill()
        holder.wait()


@pytest.fixture
def node_in_network(start, network):
    """A memory node in the network of the guest."""
    listen = "192.0.2.1:7474"
    return start("memory-node", "--memory", f"{FILE_NODE_MIB}M", "--listen", listen, wrapper=network.wrapper), listen


def test_a_guest_swaps_to_a_file_below_a_loop_device(request, node_in_network, network, tmp_path):
    """The memory node is stopped for a while."""
    node, listen = node_in_network
    guest = guest_with_file(tmp_path, network, listen, "terrace.mib=96 terrace.passes=1")
    request.addfinalizer(guest.end)
    guest.wait_for("pass 1: written")
    node.process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    node.process.send_signal(signal.SIGCONT)
    check_end(guest)
    console = guest.console()
    # The kernel has discarded what it does not need any more.
    assert re.search(r"swap device: 0 connections, \d+ requests \(0 failed\), .* \d+ freed", console), console[-2000:]
    assert "init: the device has ended" in console, console[-2000:]


def test_a_guest_all_of_whose_memory_is_in_use_swaps_to_a_file(request, node_in_network, network, tmp_path):
    """The device's process and its packets are short of memory, too."""
    _, listen = node_in_network
    words = "terrace.mib=128 terrace.passes=1 terrace.reserve=4096"
    guest = guest_with_file(tmp_path, network, listen, words, SMALL_FILE_GUEST_MIB)
    request.addfinalizer(guest.end)
    check_end(guest)


def test_a_guest_outlives_the_killed_process_of_its_swap_file(request, node_in_network, network, tmp_path):
    _, listen = node_in_network
    guest = guest_with_file(tmp_path, network, listen, "terrace.mib=80 terrace.passes=2 terrace.kills=1")
    request.addfinalizer(guest.end)
    guest.wait_for("init: end")
    console = guest.console()
    # The program has SIGBUS: its pages are lost.
    assert "init: exit status 135" in console, console[-2000:]
