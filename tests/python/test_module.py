"""The module `terrace` against `terrace serve`."""

import array
import gc
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
import unittest

import terrace
from server import MIB, TIMEOUT_S, Alarm, Server, raise_alarms

try:
    import numpy
except ImportError:
    numpy = None


def content(seed, length):
    return random.Random(seed).randbytes(length)


def fork_for_a_test():
    """Forks. A child that hangs is killed."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(TIMEOUT_S)
    return child


class Accesses(unittest.TestCase):
    """Accesses over the usual path; `OverUdp` repeats them by packets."""

    path = "auto"

    @classmethod
    def setUpClass(cls):
        # The region is larger than the server's memory.
        cls.server = Server().__enter__()
        cls.addClassCleanup(cls.server.__exit__)
        cls.client = cls.server.connect(path=cls.path)
        cls.addClassCleanup(cls.client.close)
        cls.table = cls.client.open("table")

    def test_the_region_has_name_and_length(self):
        self.assertEqual((self.table.name, len(self.table)), ("table", 8 * MIB))
        self.assertEqual(repr(self.table), '<terrace.Region "table" of 8388608 bytes>')

    def test_bytes_that_are_written_are_read(self):
        self.assertEqual(self.table.write(4093, b"hello"), 5)
        self.assertEqual(self.table.read(4093, 5), b"hello")
        self.assertIsNone(self.table.commit())
        self.assertIsNone(self.table.commit(4096, 100))

    def test_the_whole_region_is_written_and_read(self):
        data = content(1, len(self.table))
        self.assertEqual(self.table.write(0, data), len(data))
        self.assertEqual(self.table.read(0, len(data)), data)

    def test_every_kind_of_buffer(self):
        data = content(2, 4096)
        buffers = [bytearray(4096), memoryview(bytearray(8192))[10:4106], array.array("d", bytes(4096)), mmap.mmap(-1, 4096)]
        for number, buffer in enumerate(buffers):
            with self.subTest(kind=type(buffer).__name__):
                self.table.write(4096 * number, data)
                self.assertEqual(self.table.read_into(4096 * number, buffer), 4096)
                self.assertEqual(bytes(memoryview(buffer).cast("B")), data)
                self.assertEqual(self.table.write(4096 * number + 1, buffer), 4096)
                self.assertEqual(self.table.read(4096 * number + 1, 4096), data)

    @unittest.skipUnless(numpy, "needs numpy")
    def test_numpy_arrays(self):
        numbers = numpy.arange(10_000, dtype=numpy.float64).reshape(100, 100)
        self.table.write(0, numbers)
        found = numpy.zeros_like(numbers)
        self.table.read_into(0, found)
        self.assertTrue((found == numbers).all())
        self.table.read_into(0, found[50:])
        self.assertTrue((found[50:] == numbers[:50]).all())
        # Its bytes are not contiguous.
        with self.assertRaises((BufferError, ValueError)):
            self.table.read_into(0, found[:, 1])

    def test_registered_memory_and_its_parts(self):
        buffer = bytearray(1000)
        memory = self.client.register(buffer)
        self.table.write(0, content(3, 1000))
        self.table.read_into(0, memory[100:900])
        self.table.read_into(800, memory[100:900][-1:])
        self.assertEqual(buffer, bytes(100) + content(3, 1000)[:799] + content(3, 1000)[800:801] + bytes(100))
        self.assertEqual([len(memory), len(memory[10:]), len(memory[5:5]), memory.writable], [1000, 990, 0, True])
        with self.assertRaises(ValueError):
            memory[::2]
        with self.assertRaises(TypeError):
            memory[0]
        # The bytes stay in place while they are registered.
        with self.assertRaises(BufferError):
            buffer.append(1)
        del memory
        gc.collect()
        buffer.append(1)

    def test_a_buffer_is_free_after_the_access(self):
        buffer = bytearray(100)
        operation = self.table.begin_read_into(0, buffer)
        operation.wait()
        buffer.append(1)

    def test_read_only_objects_are_written_from_and_not_read_into(self):
        data = content(4, 100)
        memory = self.client.register(data)
        self.assertFalse(memory.writable)
        self.assertEqual(self.table.write(0, memory), 100)
        self.assertEqual(self.table.read(0, 100), data)
        for target in (data, memory):
            with self.assertRaises(BufferError):
                self.table.read_into(0, target)

    def test_no_bytes(self):
        self.assertEqual(self.table.read(0, 0), b"")
        self.assertEqual(self.table.read_into(len(self.table), bytearray()), 0)
        self.assertEqual(self.table.write_many([]), 0)
        self.assertEqual(self.table.write(0, self.client.register(b"")), 0)

    def test_objects_without_a_buffer(self):
        for target in (7, "text", None):
            with self.assertRaises(TypeError):
                self.table.write(0, target)
        with self.assertRaises((BufferError, ValueError)):
            self.table.read_into(0, memoryview(bytearray(100))[::2])

    def test_batches_longer_than_the_queue(self):
        with self.server.connect(path=self.path, depth=4) as client:
            table = client.open("table")
            self.assertEqual(table.write_many([(100 * part, content(part, 100)) for part in range(200)]), 20_000)
            buffers = [bytearray(100) for _ in range(200)]
            self.assertEqual(table.read_many([(100 * part, buffer) for part, buffer in enumerate(buffers)]), 20_000)
            self.assertEqual(buffers, [content(part, 100) for part in range(200)])

    def test_accesses_take_effect_in_the_order_in_which_they_begin(self):
        operations = [self.table.begin_write(5000, content(number, 9000)) for number in range(50)]
        last = self.table.begin_read(5000, 9000)
        self.assertEqual(last.wait(), content(49, 9000))
        self.assertEqual([operation.wait() for operation in operations], [9000] * 50)
        self.assertTrue(all(operation.done() for operation in operations))
        # The outcome stays.
        self.assertEqual(last.wait(), content(49, 9000))

    def test_callbacks(self):
        called = threading.Semaphore(0)
        for _ in range(100):
            self.table.begin_read(0, 100_000).add_done_callback(called.release)
        for _ in range(100):
            self.assertTrue(called.acquire(timeout=TIMEOUT_S))

    def test_several_threads(self):
        failures = []

        def work(thread):
            for turn in range(50):
                data = content((thread, turn).__hash__(), 10_000)
                self.table.write(thread * 10_000, data)
                if self.table.read(thread * 10_000, 10_000) != data:
                    failures.append((thread, turn))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def test_ranges_beyond_the_end(self):
        size = len(self.table)
        attempts = (
            lambda: self.table.read(size, 1),
            lambda: self.table.read(0, 1 << 60),
            lambda: self.table.write(size - 1, b"ab"),
            lambda: self.table.read_many([(0, bytearray(1)), (size, bytearray(1))]),
            lambda: self.table.commit(size, 1),
            lambda: self.table.commit(size + 1),
        )
        for attempt in attempts:
            with self.assertRaises(terrace.OutOfRangeError):
                attempt()
        with self.assertRaises(OverflowError):
            self.table.read(-1, 1)

    def test_a_region_that_is_not_there(self):
        with self.assertRaisesRegex(terrace.RegionNotFoundError, "nothing"):
            self.client.open("nothing")

    def test_memory_of_another_client(self):
        with self.server.connect(path=self.path) as other:
            memory = other.register(bytearray(10))
            with self.assertRaisesRegex(ValueError, "register"):
                self.table.read_into(0, memory)

    def test_a_closed_client(self):
        client = self.server.connect(path=self.path)
        table = client.open("table")
        client.close()
        client.close()
        self.assertTrue(client.closed)
        for attempt in (lambda: client.open("table"), lambda: table.read(0, 1), client.counters, table.commit):
            with self.assertRaisesRegex(terrace.ConnectionLostError, "connect again"):
                attempt()

    def test_a_forked_child_has_to_connect_again(self):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                self.table.read(0, 1)
            except terrace.ConnectionLostError:
                with self.server.connect(path=self.path) as client:
                    status = 0 if len(client.open("table").read(0, 10)) == 10 else 2
            finally:
                os._exit(status)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(len(self.table.read(0, 10)), 10)


class OverUdp(Accesses):
    """The same by packets."""

    path = "udp"


class Servers(unittest.TestCase):
    """What happens to servers, as clients see it."""

    def setUp(self):
        self.server = Server().__enter__()
        self.addCleanup(self.server.__exit__)

    def test_written_bytes_are_in_the_file_after_the_server(self):
        with self.server.connect() as client:
            client.open("table").write(12_345, b"hello")
        self.assertEqual(self.server.stop(), 0)
        self.assertEqual(self.server.path.read_bytes()[12_345:12_350], b"hello")

    def test_a_wait_ends_by_its_timeout_and_releases_the_interpreter(self):
        with self.server.connect(path="udp") as client:
            table = client.open("table")
            table.write(0, b"hello")
            self.server.pause()
            operation = table.begin_read(0, 5)
            turns = []
            other = threading.Thread(target=lambda: [turns.append(time.sleep(0.001)) for _ in range(50)])
            other.start()
            with self.assertRaises(TimeoutError):
                operation.wait(0.5)
            self.assertEqual(len(turns), 50)
            other.join()
            self.server.go_on()
            self.assertEqual(operation.wait(TIMEOUT_S), b"hello")
            for timeout in (-1, float("nan")):
                with self.assertRaises(ValueError):
                    operation.wait(timeout)
            self.assertEqual(operation.wait(float("inf")), b"hello")

    def test_a_forked_child_has_no_accesses_of_its_parent(self):
        with self.server.connect(path="udp") as client:
            table = client.open("table")
            table.write(0, b"hello")
            done = table.begin_read(0, 5)
            self.assertEqual(done.wait(TIMEOUT_S), b"hello")
            self.server.pause()
            waiting = table.begin_read(0, 5)
            child = fork_for_a_test()
            if child == 0:
                try:
                    assert done.wait() == b"hello"
                    assert not waiting.done()
                    for attempt in (waiting.wait, lambda: waiting.add_done_callback(print)):
                        with self.assertRaisesRegex(terrace.ConnectionLostError, "connect again in this process"):
                            attempt()
                    os._exit(0)
                finally:
                    os._exit(1)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.server.go_on()
            self.assertEqual(waiting.wait(TIMEOUT_S), b"hello")

    def test_a_client_can_be_printed_in_children_that_are_forked_during_a_wait(self):
        with self.server.connect(path="udp") as client:
            table = client.open("table")
            self.server.pause()
            # It uses the client all the time.
            waiting = threading.Thread(target=table.read, args=(0, 5))
            waiting.start()
            try:
                for _ in range(200):
                    child = fork_for_a_test()
                    if child == 0:
                        os._exit(int(client.closed or "closed" in repr(client)))
                    self.assertEqual(os.waitpid(child, 0)[1], 0)
            finally:
                self.server.go_on()
                waiting.join()

    def test_signals_are_handled_during_a_wait(self):
        raise_alarms(self)
        with self.server.connect(path="udp") as client:
            table = client.open("table")
            self.server.pause()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with self.assertRaises(Alarm):
                table.read(0, 5)

    def test_accesses_fail_when_the_client_closes(self):
        client = self.server.connect(path="udp")
        table = client.open("table")
        self.server.pause()
        called = threading.Event()
        buffer = bytearray(5)
        operation = table.begin_read_into(0, buffer)
        operation.add_done_callback(called.set)
        client.close()
        self.assertTrue(called.wait(TIMEOUT_S))
        with self.assertRaisesRegex(terrace.ConnectionLostError, "closed"):
            operation.wait()
        buffer.append(1)

    def test_a_server_that_is_killed(self):
        for path in ("auto", "udp"):
            with self.subTest(path=path), Server() as server, server.connect(path=path) as client:
                table = client.open("table")
                table.write(0, b"hello")
                server.kill()
                # Memory that this client maps stays until its NIC notices the end of the server.
                deadline = time.monotonic() + TIMEOUT_S
                with self.assertRaises(terrace.ConnectionLostError):
                    while time.monotonic() < deadline:
                        table.read(0, 5)

    def test_no_server(self):
        with self.assertRaisesRegex(terrace.ConnectError, "terrace serve"):
            terrace.connect("127.0.0.1", instance=250)

    def test_wrong_arguments_of_connect(self):
        for keywords in ({"path": "nothing"}, {"local": "no such host.invalid"}, {"depth": 0}, {"depth": 1 << 31}):
            with self.subTest(keywords), self.assertRaises((ValueError, OSError)):
                self.server.connect(**keywords)
        with self.assertRaisesRegex(ValueError, "0.0.0.0 is no host's address"):
            terrace.connect("0.0.0.0")
        with self.assertRaisesRegex(terrace.ConnectError, "choose one of those with `local`"):
            self.server.connect(local="192.0.2.199")

    def test_signals_are_handled_while_a_client_connects(self):
        """Where no server is: without the signal, it would be an error after 2 s."""
        raise_alarms(self)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with self.assertRaises(Alarm) as caught:
            terrace.connect("127.0.0.1", instance=250)
        self.assertIsNone(caught.exception.__context__, "it had not ended yet")

    def test_an_interpreter_ends_with_accesses_in_flight(self):
        script = f"""if True:
            import os, signal, terrace
            client = terrace.connect("127.0.0.1", instance={self.server.instance}, path="udp")
            table = client.open("table")
            os.kill({self.server.process.pid}, signal.SIGSTOP)
            operation = table.begin_read(0, 100)
            operation.add_done_callback(print)
            buffer = bytearray(10)
            other = table.begin_read_into(0, buffer)
        """
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S)
        self.assertEqual((ended.returncode, ended.stdout, ended.stderr), (0, "", ""))


if __name__ == "__main__":
    unittest.main()
