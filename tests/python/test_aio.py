"""The module `terrace.aio` against `terrace serve`."""

import asyncio
import unittest

import terrace
import terrace.aio
from server import TIMEOUT_S, Server


class Asyncio(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.server = Server().__enter__()
        self.addCleanup(self.server.__exit__)

    async def connect(self, **keywords):
        return await terrace.aio.connect("127.0.0.1", instance=self.server.instance, **keywords)

    async def test_accesses(self):
        for path in ("auto", "udp"):
            async with await self.connect(path=path) as client:
                table = await client.open("table")
                self.assertEqual((table.name, len(table), client.server), ("table", 8 << 20, "127.0.0.1"))
                self.assertEqual(await table.write(10, b"hello"), 5)
                self.assertEqual(await table.read(10, 5), b"hello")
                buffer = bytearray(5)
                memory = client.register(bytearray(3))
                self.assertEqual(await table.read_into(10, buffer), 5)
                self.assertEqual(await table.write_many((100 * part, buffer) for part in range(3)), 15)
                self.assertEqual(await table.read_many([(200, memory), (300, bytearray(1))]), 4)
                self.assertEqual(buffer, b"hello")
                self.assertIsNone(await table.commit())
            self.assertTrue(client.closed)

    async def test_many_at_a_time(self):
        async with await self.connect(path="udp", depth=16) as client:
            table = await client.open("table")
            await asyncio.gather(*(table.write(100 * part, bytes([part % 251]) * 100) for part in range(1000)))
            parts = await asyncio.gather(*(table.read(100 * part, 100) for part in range(1000)))
            self.assertEqual(parts, [bytes([part % 251]) * 100 for part in range(1000)])

    async def test_the_loop_runs_during_an_access(self):
        async with await self.connect(path="udp") as client:
            table = await client.open("table")
            self.server.pause()
            reading = table.read(0, 5)
            await asyncio.sleep(0.1)
            self.assertFalse(reading.done())
            self.server.go_on()
            self.assertEqual(await asyncio.wait_for(reading, TIMEOUT_S), bytes(5))

    async def test_a_cancelled_access_keeps_its_buffer_until_it_ends(self):
        async with await self.connect(path="udp") as client:
            table = await client.open("table")
            buffer = bytearray(5)
            self.server.pause()
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(table.read_into(0, buffer), 0.05)
            with self.assertRaises(BufferError):
                buffer.append(1)
            self.server.go_on()
            await asyncio.wait_for(self.append_when_unused(buffer), TIMEOUT_S)

    async def append_when_unused(self, buffer):
        while True:
            try:
                return buffer.append(1)
            except BufferError:
                await asyncio.sleep(0.01)

    async def test_errors(self):
        async with await self.connect(path="udp") as client:
            table = await client.open("table")
            with self.assertRaises(terrace.RegionNotFoundError):
                await client.open("nothing")
            with self.assertRaises(terrace.OutOfRangeError):
                await table.read(len(table), 1)
            self.server.pause()
            reading = table.read(0, 5)
        with self.assertRaises(terrace.ConnectionLostError):
            await reading


if __name__ == "__main__":
    unittest.main()
