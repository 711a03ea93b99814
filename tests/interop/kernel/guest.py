"""The running guest: QEMU on a tap device of this network namespace, commands over TCP, captures, and the guest's counters."""

import contextlib
import itertools
import json
import pathlib
import re
import select
import shlex
import socket
import subprocess
import tempfile
import time

import image
from harness import procs

TAP, MTU = "tap0", 9000
# Enough for all packets that a test has in flight: unreliable services do not repeat packets that a full queue drops.
TAP_QUEUE_PACKETS = 10_000
IPV4_NET, IPV6_NET = "192.0.2", "fd00:7e"
IPV4, IPV6 = f"{IPV4_NET}.2", f"{IPV6_NET}::2"
# The addresses of this side, each of which represents a host: a NIC that has an address alone has the standard port.
HOST_NUMBERS = range(16, 64)
# A NIC has one address of each family besides its own, the first in the kernel's list: the oldest of IPv4, the newest
# of IPv6.
OLDEST, NEWEST = 1, 64
COMMAND_PORT = 7000
BOOT_LIMIT_S = 90.0
COMMAND_LIMIT_S = 30.0

EXIT_STATUS = re.compile(rb"session: exit status (\d+)\n$")


class GuestError(Exception):
    """The guest has failed."""


def host_ipv4(number):
    return f"{IPV4_NET}.{number}"


def host_ipv6(number):
    return f"{IPV6_NET}::{number:x}"


def _run(*argv):
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=20)


def create_network():
    """Creates the tap device and this side's addresses, only in this network namespace."""
    # /sys shows the interfaces of the namespace in which it was mounted.
    _run("mount", "-t", "sysfs", "sysfs", "/sys")
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "tuntap", "add", TAP, "mode", "tap")
    pathlib.Path(f"/proc/sys/net/ipv6/conf/{TAP}/accept_dad").write_text("0")
    _run("ip", "link", "set", TAP, "mtu", str(MTU), "txqueuelen", str(TAP_QUEUE_PACKETS), "up")
    for number in (OLDEST, *HOST_NUMBERS, NEWEST):
        _run("ip", "address", "add", f"{host_ipv4(number)}/24", "dev", TAP)
        _run("ip", "address", "add", f"{host_ipv6(number)}/64", "dev", TAP, "nodad")


class Session:
    """A command that runs in the guest, with its input and output."""

    def __init__(self, command, limit_s=COMMAND_LIMIT_S):
        self.command = command
        self.socket = socket.create_connection((IPV4, COMMAND_PORT), timeout=limit_s)
        self.socket.sendall(command.encode() + b"\n")
        self._out = b""

    def read_until(self, complete, limit_s):
        """Reads until `complete(output)` is true or the command has ended. Returns all output so far."""
        deadline = time.monotonic() + limit_s
        while not complete(self._out):
            ready, _, _ = select.select([self.socket], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise GuestError(f"`{self.command}` in the guest took more than {limit_s:.0f} s: {self._out[-500:]!r}")
            chunk = self.socket.recv(65536)
            if not chunk:
                break
            self._out += chunk
        return self._out

    def end(self, limit_s=COMMAND_LIMIT_S):
        """Waits for the end of the command. Returns the exit status and the output."""
        out = self.read_until(EXIT_STATUS.search, limit_s)
        ending = EXIT_STATUS.search(out)
        if ending is None:
            raise GuestError(f"the guest aborted `{self.command}`: {out[-500:]!r}")
        return int(ending[1]), out[:ending.start()].decode(errors="replace")

    def close(self):
        self.socket.close()


# A guest without an answer for this long is considered dead, also on a busy machine.
SILENCE_S = 60.0
# Time for a guest to print its stack after an NMI.
TRACE_S = 10.0
LAST_LINES = 40

_boots = itertools.count(1)


class Guest:
    """A booted guest."""

    def __init__(self, log_dir):
        self.log_dir = log_dir
        boot = next(_boots)
        self.console_path = log_dir / f"console-{boot}.log"
        # The socket is in a separate folder, because its path must be short.
        self._qmp_folder = tempfile.TemporaryDirectory(prefix="terrace-interop-")
        self._qmp_path = pathlib.Path(self._qmp_folder.name) / "qmp"
        self.capture = None  # the file of the current capture
        kernel, initramfs = image.kernel(), image.initramfs()
        self.qemu = procs.Program(self._argv(kernel, initramfs), log_dir, f"qemu-{boot}")
        self._wait_for_boot()
        self._connect_qmp()
        self.gid_indexes = self._gid_indexes()
        self._fill_neighbour_table()

    def _argv(self, kernel, initramfs):
        # An oops ends the guest, because locks that stay held would block later tests. An NMI also ends it, which makes
        # an unresponsive guest print its stack.
        words = f"console=ttyS0 panic=-1 oops=panic unknown_nmi_panic terrace.ipv4={IPV4}/24 terrace.ipv6={IPV6}/64 terrace.mtu={MTU}"
        device = f"virtio-net-pci,netdev=net,romfile=,mac=52:54:00:12:34:56,host_mtu={MTU}"
        # KVM is not used, because a stock kernel hangs under an emulated /dev/kvm.
        return ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "1", "-m", "384", "-nodefaults",
                "-no-user-config", "-display", "none", "-no-reboot", "-kernel", kernel, "-initrd", initramfs, "-append", words,
                "-serial", f"file:{self.console_path}", "-qmp", f"unix:{self._qmp_path},server=on,wait=off",
                "-netdev", f"tap,id=net,ifname={TAP},script=no,downscript=no,vhost=off,vnet_hdr=off", "-device", device]

    def _wait_for_boot(self):
        deadline = time.monotonic() + BOOT_LIMIT_S
        while "init: ready" not in self.console():
            if self.qemu.wait(0.1) is not None:
                raise self._gone()
            if time.monotonic() > deadline:
                raise GuestError(f"the guest did not boot within {BOOT_LIMIT_S:.0f} s; its console: {self.console_path}")
        while True:
            with contextlib.suppress(OSError), contextlib.closing(Session("true", 5)):
                return
            if time.monotonic() > deadline:
                raise GuestError(f"the guest's command channel does not open; its console: {self.console_path}")
            time.sleep(0.1)

    def _gone(self):
        said = self.qemu.outcome().text.strip()[-500:]
        return GuestError(f"QEMU has ended: {said}; the guest's console: {self.console_path}")

    # ---- commands ----

    def start(self, command):
        """Starts a shell command. Its input and output are the session's."""
        return Session(command)

    def try_run(self, command, limit_s=COMMAND_LIMIT_S):
        """Exit status and output of a shell command."""
        with contextlib.closing(Session(f"timeout {limit_s:.0f} sh -c {shlex.quote(command)}")) as session:
            return session.end(limit_s + 5)

    def run(self, command, limit_s=COMMAND_LIMIT_S):
        """Output of a shell command that must succeed."""
        status, out = self.try_run(command, limit_s)
        if status != 0:
            raise GuestError(f"`{command[:200]}` in the guest: exit status {status}: {out.strip()[-500:]}")
        return out

    def modprobe(self, *names):
        """Loads modules of `MODULES_AT_HAND`."""
        for name in names:
            self.run(f"for m in $(cat /lib/modules/{name}.list); do "
                     "grep -q \"^$m \" /proc/modules || insmod /lib/modules/$m.ko; done")

    # ---- state ----

    def console(self):
        with contextlib.suppress(OSError):
            return self.console_path.read_text(errors="replace")
        return ""

    def has_ended(self):
        return self.qemu.wait(0.01) is not None

    def death(self):
        """The cause of the guest's death, or None if it is alive."""
        try:
            if not self.has_ended():
                with contextlib.closing(Session("true", SILENCE_S)) as session:
                    session.end(SILENCE_S)
                return None
        except (GuestError, OSError) as error:
            # QEMU may be about to end.
            if self.qemu.wait(1) is None:
                with contextlib.suppress(GuestError, OSError):
                    self._execute_qmp("inject-nmi")
                self.qemu.wait(TRACE_S)
                return f"the guest does not answer: {error}"
        return f"the guest has ended, QEMU with {self.qemu.outcome().verdict}"

    def last_output(self):
        return "\n".join(self.console().splitlines()[-LAST_LINES:])

    def _gid_indexes(self):
        """The GID index of each of the guest's addresses."""
        table = self.run("cd /sys/class/infiniband/rxe0/ports/1/gids && grep . *").splitlines()
        gids = {line.split(":", 1)[1].replace(":", ""): int(line.split(":", 1)[0]) for line in table}
        mapped = (bytes(10) + b"\xff\xff" + socket.inet_aton(IPV4)).hex()
        return {IPV4: gids[mapped], IPV6: gids[socket.inet_pton(socket.AF_INET6, IPV6).hex()]}

    def _fill_neighbour_table(self):
        """Adds this side's addresses to the guest's neighbour table. Without an entry rxe waits a second for the ARP
        answer."""
        own_mac = pathlib.Path(f"/sys/class/net/{TAP}/address").read_text().strip()
        addresses = [address(number) for number in (1, *HOST_NUMBERS) for address in (host_ipv4, host_ipv6)]
        # A command is one line, so the guest's printf writes the line breaks.
        lines = "".join(rf"neigh replace {address} lladdr {own_mac} dev eth0 nud permanent\n" for address in addresses)
        self.run(f"printf '{lines}' | /bin/ip -batch -")

    def counters(self):
        """The counters of the rxe device."""
        (shown,) = json.loads(self.run("rdma -j statistic show link rxe0/1"))
        return {name: value for name, value in shown.items() if isinstance(value, int)}

    # ---- captures ----

    def _connect_qmp(self):
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel.settimeout(COMMAND_LIMIT_S)
        channel.connect(str(self._qmp_path))
        self._qmp = channel.makefile("rw")
        self._qmp.readline()  # its greeting
        self._execute_qmp("qmp_capabilities")

    def _execute_qmp(self, command, **arguments):
        message = {"execute": command, "arguments": arguments}
        self._qmp.write(json.dumps(message) + "\n")
        self._qmp.flush()
        while True:
            line = self._qmp.readline()
            if not line:
                raise self._gone()
            answer = json.loads(line)
            if "error" in answer:
                raise GuestError(f"QEMU: {answer['error']['desc']}")
            if "return" in answer:
                return

    def begin_capture(self, path):
        """Starts the capture of every packet on the wire to a file."""
        self._execute_qmp("object-add", **{"qom-type": "filter-dump", "id": "dump", "netdev": "net", "file": str(path)})
        self.capture = path

    def end_capture(self):
        self._execute_qmp("object-del", id="dump")

    def close(self):
        """Ends QEMU, if it still runs."""
        self.qemu.stop()
        self._qmp_folder.cleanup()
