"""A region of `terrace serve`, larger than the node's memory, used by a peer without Terrace.

Such a peer gets the fault policy Wait: the node fetches absent pages, then answers. The test learns the queue pair
number and the key of the region by the node's protocol, which it speaks on rxe's behalf: a management datagram, then
messages.
"""

import os
import random
import struct

import control
import peers
from harness import procs
from harness.endpoint import LOCAL_WRITE, SUCCESS, TERRACE, stat
from peers import KernelPeer

MIB = 1 << 20
REGION_BYTES, DRAM_BYTES = 32 * MIB, 4 * MIB
READ_BYTES, READS_AT_ONCE = 256 << 10, 4
SEED, NEW_SEED = 3, 4
MTU_BYTES, MTU = 4096, 5
PSN = 0xABCDE
# Offsets of messages in the guest's memory.
OUT, IN, MESSAGE_BYTES = READ_BYTES * READS_AT_ONCE, READ_BYTES * READS_AT_ONCE + 8192, 4096


class Client:
    """The guest's end of a connection to a node's region."""

    def __init__(self, end, node_address, name):
        self.end, self.node_address = end, node_address
        end.mr("m", "anon", 2 * MIB)
        self._connect("control", *self._request_control())
        _, _, body = self.request(control.FIND, name.encode())
        self.rkey, self.va, self.length, _ = control.found(body)
        _, _, body = self.request(control.PAIR, struct.pack("<IIH", end.qp("data"), PSN, MTU_BYTES))
        qpn, psn, _ = struct.unpack_from("<IIH", body)
        self._connect("data", qpn, psn)

    def _request_control(self):
        request = control.connection_request(1, self.end.qp("control"), PSN, MTU_BYTES)
        gid_index = peers.guest.gid_indexes[self.end.address]
        answer = peers.guest.run(f"mad {self.node_address} {gid_index} {request.hex()}")
        status, qpn, psn = control.accepted(bytes.fromhex(answer))
        assert status == control.OK, status
        return qpn, psn

    def _connect(self, name, qpn, psn):
        words = [f"sq_psn={PSN}", f"rq_psn={psn}", f"mtu={MTU}", *self.end.path_words(self.node_address)]
        self.end("connect", name, self.node_address, qpn, *words)

    def request(self, kind, body):
        """Sends a message and returns kind, status and body of the answer."""
        message = control.message(kind, body)
        self.end("recv", "control", 2, "m", IN, MESSAGE_BYTES)
        self.end("bytes", "m", OUT, message.hex())
        self.end("post", "control", "send", 1, "m", OUT, len(message), 0, 0)
        completions = self.end.completions("control", 2)
        assert sorted(completion[:2] for completion in completions) == [(1, SUCCESS), (2, SUCCESS)], completions
        (answer,) = self.end("hex", "m", IN, MESSAGE_BYTES)
        kind, status, _, body = control.opened_message(bytes.fromhex(answer))
        return kind, status, body

    def post(self, op, ident, local, length, offset, *options):
        self.end("post", "data", op, ident, "m", local, length, self.va + offset, self.rkey, *options)


class Served(KernelPeer):
    def setUp(self):
        super().setUp()
        self.path = peers.guest.log_dir / f"{self.id()}.bin"
        self.addCleanup(self.path.unlink)
        self.writer = self.host()
        self.writer.mr("m", "file", REGION_BYTES, LOCAL_WRITE, self.path)
        self.writer("fill", "m", 0, REGION_BYTES, SEED)
        self.drop_page_cache()

    def drop_page_cache(self):
        """Writes the file back and drops it from the page cache, except for mapped pages."""
        file = os.open(self.path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)

    def serve(self, *options):
        """A node, and the guest as its client."""
        # IPv6 is used because the guest's kernel matches the answer to a management datagram by GIDs, and would
        # interpret an IPv4 header as one.
        address = peers.fresh_address(6)
        argv = [TERRACE, "serve", "--region", f"table={self.path}", "--dram", DRAM_BYTES, "--listen", address, *options]
        node = procs.Program(argv, peers.guest.log_dir, f"serve-{address}")
        self.addCleanup(node.stop)
        try:
            self.eventually(lambda: "serving at" in node.paths[0].read_text(), "the node serves")
            return node, Client(self.peer(6), address, "table")
        except BaseException:
            # The node has locked the file, which the next node needs.
            node.stop()
            raise

    def memory(self, node):
        """The node's statistics of the region; checks its memory, too."""
        memory = stat(node.process.pid)["memory"]
        (region,) = memory["regions"]
        self.assertLessEqual(memory["resident_bytes"], DRAM_BYTES)
        return region

    def read_everything(self, client, seed_of):
        """READs the whole region in random order with several outstanding READs, and checks every byte."""
        offsets = list(range(0, REGION_BYTES, READ_BYTES))
        random.Random(1).shuffle(offsets)
        for first in range(0, len(offsets), READS_AT_ONCE):
            batch = list(enumerate(offsets[first:first + READS_AT_ONCE]))
            for index, offset in batch:
                client.post("read", index, index * READ_BYTES, READ_BYTES, offset)
            self.assertEqual(client.end.poll("data", len(batch)), [(index, SUCCESS) for index, _ in batch])
            for index, offset in batch:
                self.check_content(client.end, index * READ_BYTES, READ_BYTES, seed_of(offset), **{"from": offset})

    def test_reads(self):
        for mode in ("term", "wait"):
            with self.subTest(mode=mode):
                self.drop_page_cache()
                node, client = self.serve("--mode", mode)
                try:
                    self.assertEqual(client.length, REGION_BYTES)
                    self.read_everything(client, lambda _offset: SEED)
                    region = self.memory(node)
                    self.assertGreater(region["pages_read"], 0, region)
                finally:
                    node.stop()

    def test_writes_and_atomics(self):
        """WRITEs and atomics take effect in the file, for resident and absent pages."""
        node, client = self.serve()
        rewritten = set(random.Random(2).sample(range(0, REGION_BYTES, READ_BYTES), 24))
        for offset in rewritten:
            client.end("fill", "m", 0, READ_BYTES, NEW_SEED, f"from={offset}")
            client.post("write", 1, 0, READ_BYTES, offset)
            self.expect(client.end, "data", what="write")
        self.read_everything(client, lambda offset: NEW_SEED if offset in rewritten else SEED)
        for count, offset in enumerate(range(8, REGION_BYTES, 4 * MIB)):
            # The file does not have the newest bytes while the node runs.
            client.post("read", 1, 0, 8, offset)
            self.expect(client.end, "data", what="read")
            before = client.end("word", "m", 0)["value"]
            client.post("add", 1, 0, 8, offset, f"add={count + 1}")
            self.expect(client.end, "data", what="fetch and add")
            self.assertEqual(client.end("word", "m", 0), {"value": before})
            client.post("read", 1, 0, 8, offset)
            self.expect(client.end, "data", what="read")
            self.assertEqual(client.end("word", "m", 0), {"value": before + count + 1 & (1 << 64) - 1})
        region = self.memory(node)
        self.assertGreater(region["pages_placed"], 0, region)
        self.assertGreater(region["evictions"], 0, region)
        node.stop()
        for offset in rewritten:
            # The offset is behind the words that the atomics changed.
            self.check_content(self.writer, offset + 16, READ_BYTES - 16, NEW_SEED)
