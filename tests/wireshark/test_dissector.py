"""The Wireshark dissector of APPEND (tools/wireshark/terrace.lua), by tshark and packets that are written out here."""

import pathlib
import shutil
import struct
import subprocess
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "tools/wireshark/terrace.lua"

CLIENT, SERVER = bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])
RAW_IPV4 = 228

APPEND_FIRST, APPEND_MIDDLE, APPEND_LAST, APPEND_ONLY = 0xC0, 0xC1, 0xC2, 0xC4
SEND_ONLY, ATOMIC_ACKNOWLEDGE = 0x04, 0x12


def packet(source, destination, opcode, psn, rest, pad=0, port=4791):
    """An IPv4 packet: BTH, extension headers and data, padding, and an ICRC that nobody checks."""
    bth = struct.pack(">BBHII", opcode, 0x40 | pad << 4, 0xFFFF, 0x11, 1 << 31 | psn)
    body = bth + rest + bytes(pad) + b"icrc"
    udp = struct.pack(">HHHH", 50000, port, 8 + len(body), 0)
    ip = struct.pack(">BBHHHBBH", 0x45, 0, 28 + len(body), 0, 0, 64, 17, 0)
    return ip + source + destination + udp + body


def append_header(rkey, length, flags):
    return struct.pack(">III", rkey, length, flags)


def answer(offset, msn):
    return struct.pack(">IQ", 0x1F << 24 | msn, offset)


PACKETS = [
    packet(CLIENT, SERVER, SEND_ONLY, 99, b"data"),
    packet(CLIENT, SERVER, APPEND_ONLY, 100, append_header(0xABCD, 5, 1) + b"hello", pad=3),
    packet(SERVER, CLIENT, ATOMIC_ACKNOWLEDGE, 100, answer(4096, 1)),
    packet(CLIENT, SERVER, APPEND_FIRST, 101, append_header(0xABCD, 516, 0) + bytes(256), port=4793),
    packet(CLIENT, SERVER, APPEND_MIDDLE, 102, bytes(256), port=4793),
    packet(CLIENT, SERVER, APPEND_LAST, 103, b"last", port=4793),
    packet(SERVER, CLIENT, ATOMIC_ACKNOWLEDGE, 103, answer(4101, 2)),
    # The answer to a true atomic.
    packet(SERVER, CLIENT, ATOMIC_ACKNOWLEDGE, 104, answer(7, 3)),
    packet(CLIENT, SERVER, APPEND_ONLY, 105, b"short"[:3]),
]

FIELDS = ["opcode", "rkey", "length", "commit", "data", "offset", "request", "truncated"]


@unittest.skipUnless(shutil.which("tshark"), "tshark is not installed")
class Dissector(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as directory:
            capture = pathlib.Path(directory) / "append.pcap"
            records = [struct.pack("<IIII", index, 0, len(data), len(data)) + data for index, data in enumerate(PACKETS)]
            capture.write_bytes(struct.pack("<IHHIIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, RAW_IPV4) + b"".join(records))
            command = ["tshark", "-2", "-X", f"lua_script:{SCRIPT}", "-r", str(capture), "-T", "fields", "-E", "separator=|"]
            for field in [f"terrace_append.{name}" for name in FIELDS] + ["_ws.col.Info"]:
                command += ["-e", field]
            shown = subprocess.run(command, capture_output=True, text=True)
        cls.errors = shown.stderr
        rows = [line.split("|") for line in shown.stdout.splitlines()]
        cls.rows = [dict(zip(FIELDS + ["info"], row)) for row in rows]

    def test_the_script_loads(self):
        self.assertNotIn("Lua", self.errors)
        self.assertEqual(len(self.rows), len(PACKETS), self.errors)

    def expect(self, number, **fields):
        row = self.rows[number - 1]
        for name, value in fields.items():
            self.assertEqual(row[name], value, f"{name} of packet {number}: {row}")

    def test_requests(self):
        self.expect(2, opcode="RC APPEND Only", rkey="0x0000abcd", length="5", commit="1", data="68656c6c6f")
        self.assertIn("RC APPEND Only length=5 commit", self.rows[1]["info"])
        self.expect(4, opcode="RC APPEND First", length="516", commit="0", data="00" * 256)
        self.expect(5, opcode="RC APPEND Middle", length="", data="00" * 256)
        self.expect(6, opcode="RC APPEND Last", length="", data="6c617374")

    def test_acknowledgements(self):
        self.expect(3, offset="4096", request="2")
        self.expect(7, offset="4101", request="6")
        self.assertIn("APPEND offset=4101", self.rows[6]["info"])

    def test_other_packets_are_shown_as_before(self):
        self.expect(1, opcode="", offset="")
        self.expect(8, opcode="", offset="")
        self.assertIn("RC Send Only", self.rows[0]["info"])

    def test_a_truncated_packet_is_marked(self):
        self.assertNotEqual(self.rows[8]["truncated"], "")


if __name__ == "__main__":
    unittest.main()
