"""The guest's image: Debian's stock kernel with rdma_rxe, and an initramfs of Debian's programs.

Both lie below build/interop/guest/ and are made again when something that goes in has changed. The kernel is not installed on
this machine: `scripts/setup.sh interop` has only unpacked its package.
"""

import hashlib
import lzma
import pathlib
import shutil
import stat
import subprocess
import zlib

from harness import procs

HERE = pathlib.Path(__file__).resolve().parent
BUILD = procs.ROOT / "build/interop"
KERNEL_ROOT = BUILD / "kernel"  # where setup.sh has unpacked the package
GUEST = BUILD / "guest"

# Loaded in this order, each with its dependencies. rxe of 6.1 requests "crc32" by the name of the algorithm, not of the
# module, so the module must be loaded before.
MODULES = ["virtio_pci", "virtio_net", "crc32_generic", "rdma_rxe", "rdma_ucm", "ib_umad"]
# Loaded by the tests that need them (`Guest.modprobe`).
MODULES_AT_HAND = ["sch_netem", "sch_prio", "sch_ingress", "cls_u32", "act_mirred", "ifb"]

# Debian's programs by name. Their libraries are added.
PROGRAMS = ["ip", "rdma", "tc", "ib_read_bw", "ib_read_lat", "ib_write_bw", "ib_write_lat", "ib_send_bw", "ib_send_lat",
            "ib_atomic_bw", "ib_atomic_lat", "ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong", "ibv_devinfo",
            "rping", "ucmatose", "udaddy", "rdma_server", "rdma_client"]
# Terrace's test programs: `endpoint` is an end of a connection, `mad` sends a management datagram, `cm_talk` connects
# by address.
OWN_PROGRAMS = [procs.ROOT / "build/negative/programs/endpoint", BUILD / "programs/mad", BUILD / "programs/cm_talk"]
BUSYBOX = pathlib.Path("/bin/busybox")
# rxe's provider for libibverbs is loaded by name, so it is in no list of libraries.
PROVIDER_PATTERN = "usr/lib/*/libibverbs/librxe-*.so"
# The C library loads it when a thread is cancelled, as by rping.
UNWINDER_PATTERN = "lib/*/libgcc_s.so.1"
PROVIDER_CONFIGURATION = pathlib.Path("/etc/libibverbs.d/rxe.driver")


class Incomplete(Exception):
    """A file for the guest is missing."""


def kernel():
    """The kernel's file."""
    found = sorted(KERNEL_ROOT.glob("boot/vmlinuz-*"))
    if not found:
        raise Incomplete(f"no kernel below {KERNEL_ROOT}: run scripts/setup.sh interop")
    return found[-1]


def initramfs():
    """The initramfs's file, which is created unless it is up to date."""
    content = _content()
    digest = hashlib.sha256()
    for name, (mode, data) in sorted(content.items()):
        digest.update(f"{name} {mode:o} {len(data)} ".encode() + hashlib.sha256(data).digest())
    path = GUEST / f"initramfs-{digest.hexdigest()[:16]}.gz"
    if not path.exists():
        GUEST.mkdir(parents=True, exist_ok=True)
        for old in GUEST.glob("initramfs-*"):
            old.unlink()
        compressor = zlib.compressobj(level=1, wbits=31)
        partial = path.with_suffix(".part")
        partial.write_bytes(compressor.compress(archive(content)) + compressor.flush())
        partial.rename(path)
    return path


def _content():
    """All files of the guest: path to mode and bytes."""
    files = {"init": (0o100755, (HERE / "init.sh").read_bytes()),
             "bin/session": (0o100755, (HERE / "session.sh").read_bytes()),
             "bin/busybox": (0o100755, _read(BUSYBOX)),
             PROVIDER_CONFIGURATION.as_posix()[1:]: (0o100644, _read(PROVIDER_CONFIGURATION))}
    binaries = [program(name) for name in PROGRAMS] + OWN_PROGRAMS
    loaded_by_name = [path for pattern in (PROVIDER_PATTERN, UNWINDER_PATTERN) for path in _found(pattern)]
    files.update(programs(binaries, loaded_by_name))
    files.update(modules([*((name, "boot") for name in MODULES), *((name, name) for name in MODULES_AT_HAND)]))
    return files


def programs(binaries, loaded_by_name=()):
    """Programs as bin/NAME with their libraries, and libraries that they load by name."""
    files = {f"bin/{binary.name}": (0o100755, _read(binary)) for binary in binaries}
    for library in {library for binary in [*binaries, *loaded_by_name] for library in _libraries(binary)} | set(loaded_by_name):
        files[library.as_posix()[1:]] = (0o100755, _read(library))
    return files


def _found(pattern):
    found = list(pathlib.Path("/").glob(pattern))
    if not found:
        raise Incomplete(f"/{pattern} is missing: run scripts/setup.sh interop")
    return found


def program(name):
    """The path of one of Debian's programs."""
    found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
    if found is None:
        raise Incomplete(f"{name} is not installed: run scripts/setup.sh interop")
    return pathlib.Path(found)


def _read(path):
    try:
        return path.read_bytes()
    except OSError as error:
        raise Incomplete(f"{path}: {error.strerror}: run scripts/setup.sh interop and make interop-programs") from error


def _libraries(binary):
    """The libraries that the dynamic linker loads for a binary, by their paths."""
    listing = subprocess.run(["ldd", binary], capture_output=True, text=True, timeout=20, check=True).stdout
    words = [word for line in listing.splitlines() for word in line.split() if word.startswith("/")]
    return [pathlib.Path(word) for word in words]


def modules(groups):
    """Pairs of a module and its group as lib/modules/NAME.ko, and for each group a list of modules in loading order."""
    (tree,) = [path.parent for path in KERNEL_ROOT.glob("**/modules.dep")]
    needs = {}
    for line in (tree / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        # A module's dependencies are listed in reverse order of loading.
        needs[_module_name(path)] = [*reversed(rest.split()), path]
    files = {}
    for name, group in groups:
        if name not in needs:
            continue  # built into this kernel
        listed = files.setdefault(f"lib/modules/{group}.list", (0o100644, b""))[1]
        for path in needs[name]:
            files[f"lib/modules/{_module_name(path)}.ko"] = (0o100644, _module(tree / path))
            listed += f"{_module_name(path)}\n".encode()
        files[f"lib/modules/{group}.list"] = (0o100644, listed)
    return files


def _module_name(path):
    return pathlib.Path(path).name.split(".")[0].replace("-", "_")


def _module(path):
    data = _read(path)
    return lzma.decompress(data) if path.suffix == ".xz" else data


def archive(files):
    """A cpio archive ("newc", as the kernel unpacks it), the folders first."""
    folders = {str(parent): (0o040755, b"") for name in files for parent in pathlib.PurePosixPath(name).parents}
    folders.pop(".")
    folders.update({name: (0o040755, b"") for name in ("dev", "proc", "sys", "tmp")})
    entries = [*sorted(folders.items()), *sorted(files.items()), ("TRAILER!!!", (0, b""))]
    out = bytearray()
    for index, (name, (mode, data)) in enumerate(entries):
        links = 2 if stat.S_ISDIR(mode) else 1
        fields = [index + 1, mode, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
        out += b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        out += bytes(-len(out) % 4) + data
        out += bytes(-len(out) % 4)
    return bytes(out)
