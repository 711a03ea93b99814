"""A network plugin of NCCL, called as NCCL calls it, without a GPU: a receiver and a sender of messages in host memory.

    nccl_net.py receiver|sender DIRECTORY PLUGIN

PLUGIN is a library with `ncclNetPlugin_v8`. The ends find each other by a file in the directory. The receiver verifies every byte.
"""

import ctypes
import os
import pathlib
import sys
import time
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ulong, c_void_p

import numpy as np

LIMIT_S = 40
BYTES = 16 << 20
HANDLE_BYTES = 128
HOST_MEMORY = 1
# Offset and length of each message.
MESSAGES = [(0, 8), (64, 4095), (1 << 20, 1 << 20), (4 << 20, (8 << 20) + 1)]


def function(*arguments):
    return ctypes.CFUNCTYPE(c_int, *arguments)


class Plugin(ctypes.Structure):
    """`ncclNet_v8_t`, up to the last function that is called here."""

    _fields_ = [
        ("name", c_char_p),
        ("init", function(c_void_p)),
        ("devices", function(POINTER(c_int))),
        ("get_properties", c_void_p),
        ("listen", function(c_int, c_void_p, POINTER(c_void_p))),
        ("connect", function(c_int, c_void_p, POINTER(c_void_p), POINTER(c_void_p))),
        ("accept", function(c_void_p, POINTER(c_void_p), POINTER(c_void_p))),
        ("reg_mr", function(c_void_p, c_void_p, c_size_t, c_int, POINTER(c_void_p))),
        ("reg_mr_dma_buf", c_void_p),
        ("dereg_mr", function(c_void_p, c_void_p)),
        ("isend", function(c_void_p, c_void_p, c_int, c_int, c_void_p, POINTER(c_void_p))),
        ("irecv", function(c_void_p, c_int, POINTER(c_void_p), POINTER(c_int), POINTER(c_int), POINTER(c_void_p), POINTER(c_void_p))),
        ("iflush", c_void_p),
        ("test", function(c_void_p, POINTER(c_int), POINTER(c_int))),
    ]


# NCCL's logger has a variable number of arguments: the format is enough here.
@ctypes.CFUNCTYPE(None, c_int, c_ulong, c_char_p, c_int, c_char_p)
def log(level, _subsystem, file, line, text):
    print(f"{level} {file.decode()}:{line} {text.decode()}", file=sys.stderr)


def check(status, what):
    if status != 0:
        sys.exit(f"{what}: {status}")


def until(call, what):
    """Repeats a call that returns something false as long as there is no result."""
    deadline = time.monotonic() + LIMIT_S
    while not (result := call()):
        if time.monotonic() > deadline:
            sys.exit(f"waited {LIMIT_S} s for {what}")
    return result


def until_set(call, what):
    """Repeats a call of the plugin that sets its argument."""
    found = c_void_p()

    def attempt():
        check(call(found), what)
        return found.value

    until(attempt, what)
    return found


def finish(net, request):
    done, sizes = c_int(), (c_int * 8)()

    def attempt():
        check(net.test(request, byref(done), sizes), "test")
        return done.value

    until(attempt, "a message")
    return sizes[0]


def pattern():
    return np.random.Generator(np.random.PCG64(11)).integers(0, 256, BYTES, dtype=np.uint8)


def register(net, connection, memory):
    key = c_void_p()
    check(net.reg_mr(connection, memory.ctypes.data, memory.nbytes, HOST_MEMORY, byref(key)), "regMr")
    return key


def receiver(net, path):
    handle, listener, ignored = ctypes.create_string_buffer(HANDLE_BYTES), c_void_p(), c_void_p()
    check(net.listen(0, handle, byref(listener)), "listen")
    path.with_suffix(".part").write_bytes(handle.raw)
    path.with_suffix(".part").rename(path)
    connection = until_set(lambda found: net.accept(listener, byref(found), byref(ignored)), "accept")
    memory = np.zeros(BYTES, dtype=np.uint8)
    key = register(net, connection, memory)
    for offset, length in MESSAGES:
        parts = (c_void_p * 1)(memory.ctypes.data + offset), (c_int * 1)(length), (c_int * 1)(0), (c_void_p * 1)(key.value)
        size = finish(net, until_set(lambda found, parts=parts: net.irecv(connection, 1, *parts, byref(found)), "irecv"))
        assert size == length, f"{size} bytes instead of {length}"
    expected, sent = np.zeros(BYTES, dtype=np.uint8), pattern()
    for offset, length in MESSAGES:
        expected[offset:offset + length] = sent[offset:offset + length]
    assert np.array_equal(memory, expected), "the bytes that have arrived differ"


def sender(net, path):
    until(path.exists, path.name)
    handle, ignored = ctypes.create_string_buffer(path.read_bytes(), HANDLE_BYTES), c_void_p()
    connection = until_set(lambda found: net.connect(0, handle, byref(found), byref(ignored)), "connect")
    memory = pattern()
    key = register(net, connection, memory)
    for offset, length in MESSAGES:
        address = memory.ctypes.data + offset
        finish(net, until_set(lambda found, a=address, n=length: net.isend(connection, a, n, 0, key, byref(found)), "isend"))


def main():
    role, directory, path = sys.argv[1:]
    net = Plugin.in_dll(ctypes.CDLL(path, os.RTLD_LAZY), "ncclNetPlugin_v8")
    check(net.init(ctypes.cast(log, c_void_p)), "init")
    count = c_int()
    check(net.devices(byref(count)), "devices")
    assert count.value > 0, "no device"
    {"receiver": receiver, "sender": sender}[role](net, pathlib.Path(directory) / "handle")
    print("verified", flush=True)
    # The plugin's threads go on.
    os._exit(0)


if __name__ == "__main__":
    main()
