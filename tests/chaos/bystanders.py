"""Well-behaved peers: each of their operations must complete without an error and with correct data."""

import collections
import multiprocessing
import random
import struct
import threading
import time

import control
import roce
from control import NoAnswer, ControlClient, message
from harness import procs
from harness.endpoint import RTS, SUCCESS, Endpoint

MIB = 1 << 20
PSN = 0x400000  # the streams' initial PSN, so that an attacker can guess numbers below and above it
STREAM_BYTES = 16 << 10
INSTANCE_OF_CONTROL = 1


class Failure(Exception):
    """An operation of a bystander failed."""


class Stream:
    """A verbs program that WRITEs and READs back, each time at another offset."""

    def __init__(self, name, end, remote, rkey, span):
        self.name, self.end, self.words = name, end, ("stream", "q", "m", remote, rkey, f"span={span}")

    def start(self):
        self.end(*self.words)

    def stop(self):
        """Stops the stream; returns its count of rounds."""
        result = self.end("stop", "q")
        if (result["wrong"], result["status"], result["pending"]) != (0, SUCCESS, 0):
            raise Failure(f"{self.name}: {result}")
        if self.end("state", "q")["state"] != RTS:
            raise Failure(f"{self.name}: the connection has ended")
        return result["rounds"]


def stream_between(name, client, program, program_name, span):
    """One endpoint writes to another one's memory. Returns the stream, and the addresses and queue pairs that a sniffer
    would see."""
    client.mr("m", "anon", 2 * STREAM_BYTES)
    region = program.mr(program_name, "anon", span)
    qpns = client.qp("q"), program.qp(program_name)
    words = (f"sq_psn={PSN}", f"rq_psn={PSN}")
    client("connect", "q", program.address, qpns[1], *words)
    program("connect", program_name, client.address, qpns[0], *words)
    return Stream(name, client, region["addr"], region["rkey"], span), [
        (client.address, program.address, qpns[1]), (program.address, client.address, qpns[0])]


def stream_to_node(name, client, node_address, region_name, offset, span):
    """A plain verbs program uses a region of a memory node. A `ControlClient` with another instance index of its address
    speaks the node's protocol for it."""
    client.mr("m", "anon", 2 * STREAM_BYTES)
    qpn = client.qp("q")
    peer = roce.Peer(client.address, INSTANCE_OF_CONTROL << 16)
    control_client = ControlClient(peer, node_address, INSTANCE_OF_CONTROL << 16 | 0x200)
    rkey, va, _, _ = control_client.find(region_name)
    kind, _, body = control_client.request(control.PAIR, struct.pack("<IIH", qpn, PSN, control.MTU))
    assert kind == control.PAIRED, kind
    server_qpn, server_psn, _ = struct.unpack_from("<IIH", body)
    client("connect", "q", node_address, server_qpn, f"sq_psn={PSN}", f"rq_psn={server_psn}")
    threading.Thread(target=acknowledge_keepalives, args=(control_client,), daemon=True).start()
    return Stream(name, client, va + offset, rkey, span), [(client.address, node_address, server_qpn)]


def acknowledge_keepalives(client):
    """Acknowledges the node's keepalive WRITEs, like the NIC of a client."""
    while True:
        packet = client.peer.receive(60)
        if packet is not None and packet.opcode == roce.WRITE_ONLY:
            client.acknowledge(packet.psn)


class Worker:
    """An operation that a separate process repeats. `once` raises an error, and returns an additional event to count,
    or None."""

    def __init__(self, name):
        self.name, self.failed, self.counts = name, False, collections.Counter()
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._main, args=(theirs,), daemon=True)

    def begin(self):
        self._process.start()
        self._expect("ready")

    def _main(self, pipe):
        try:
            self.prepare()
            pipe.send("ready")
            while pipe.recv() == "start":
                done, counts = 0, collections.Counter()
                while not pipe.poll():
                    seen = self.once()
                    counts.update([seen] if seen else [])
                    done += 1
                pipe.recv()
                pipe.send((done, counts))
        except (Exception, EOFError) as error:  # the parent process reports it
            pipe.send(error)

    def _expect(self, what=None, timeout_s=30):
        answer = self._pipe.recv() if self._pipe.poll(timeout_s) else TimeoutError(f"nothing for {timeout_s} s")
        self.failed = isinstance(answer, BaseException) or (what is not None and answer != what)
        if self.failed:
            raise Failure(f"{self.name}: {type(answer).__name__} {answer}")
        return answer

    def start(self):
        if not self.failed:
            self._pipe.send("start")

    def stop(self):
        """Stops the work; returns its count of repetitions, 0 after a failure."""
        if self.failed:
            return 0
        self._pipe.send("stop")
        done, counts = self._expect()
        self.counts += counts
        return done

    def end(self):
        self._process.terminate()
        self._process.join()


class Requester(Worker):
    """A client of a memory node that writes and reads back by RPC, and compares. It repeats lost requests, like a
    NIC."""

    RECORD_BYTES = 512
    RETRY_S, REPLY_TIMEOUT_S = 0.1, 20

    def __init__(self, name, address, node_address, region_name, offset, span):
        super().__init__(name)
        self.address, self.node_address, self.region_name = address, node_address, region_name
        self.offset, self.places = offset, span // self.RECORD_BYTES

    def prepare(self):
        self.client = ControlClient(roce.Peer(self.address), self.node_address)
        self.rkey, va, _, region_id = self.client.find(self.region_name)
        self.va = va + self.offset
        self.client.grant(self.rkey, region_id)
        self.random = random.Random(8)
        self.number = 0

    def request(self, kind, body):
        """Sends a request until an answer to it arrives. Returns the packet with the answer."""
        self.number += 1
        data, client = message(kind, body, ident=self.number), self.client
        psn, deadline = client.psn, time.monotonic() + self.REPLY_TIMEOUT_S
        client.send_message(data)
        while True:
            try:
                packet = client.receive_packet(self.RETRY_S)
            except NoAnswer:
                if time.monotonic() > deadline:
                    raise Failure("no answer") from None
                # A retransmission keeps its PSN.
                client.psn = psn
                client.send_message(data)
                continue
            if packet.opcode == roce.SEND_ONLY:
                if packet.psn == client.expected_psn - 1 & roce.PSN_MASK:
                    return packet
            elif packet.psn == client.expected_psn:
                client.acknowledge(packet.psn)
                client.expected_psn = packet.psn + 1 & roce.PSN_MASK
                if packet.opcode == roce.WRITE_ONLY_IMM:
                    return packet
            else:
                client.acknowledge(client.expected_psn - 1)

    def once(self):
        place = self.va + self.random.randrange(self.places) * self.RECORD_BYTES
        data = self.random.randbytes(self.RECORD_BYTES)
        packet = self.request(control.WRITE, control.write(self.rkey, place, data))
        kind, status, ident, _ = control.opened_message(packet.body)
        if (kind, status, ident) == (control.DONE, control.BUSY, self.number):
            return
        if (kind, status, ident) != (control.DONE, control.OK, self.number):
            raise Failure(f"a write was answered with {kind}, {status}, {ident}")
        packet = self.request(control.READ, control.read(self.rkey, place, self.RECORD_BYTES))
        # The answer is sent with the data, behind the header of the RDMA WRITE and the immediate.
        if packet.opcode != roce.WRITE_ONLY_IMM or packet.body[20:20 + self.RECORD_BYTES] != data:
            raise Failure(f"a read at {place:#x} returned wrong data")


class Caller(Worker):
    """A program that connects by rdma_cm, exchanges messages, checks their content, and disconnects."""

    PINGS = 5
    # At its end rping closes its channel while another of its threads reads from it, and sometimes fails because of
    # that: github.com/linux-rdma/rdma-core/pull/1622, which Debian 12 does not have.
    ERROR_AFTER_THE_END = "rdma_get_cm_event: Bad file descriptor\n"

    def __init__(self, name, address, server_address, port, log_dir):
        super().__init__(name)
        self.argv = procs.under_terrace(
            ["rping", "-c", "-v", "-V", "-C", str(self.PINGS), "-a", server_address, "-p", str(port), "-I", address], "--path", "auto",
            addr=address)
        self.log_dir = log_dir

    def prepare(self):
        pass

    def once(self):
        outcome = procs.run_one(self.argv, self.log_dir, "caller", timeout_s=25)
        has_pinged = all(f"rdma-ping-{number}:" in outcome.out for number in range(self.PINGS))
        if has_pinged and outcome.status == 0:
            return None
        if has_pinged and (outcome.status or -1) > 0 and outcome.err == self.ERROR_AFTER_THE_END:
            return "runs of rping that closed its channel before it had stopped reading there (rdma-core pull request 1622)"
        raise Failure(f"{outcome.verdict}: {outcome.text.strip()}")


def endpoint(address, *options):
    end = Endpoint(address, *options)
    end("open")
    return end
