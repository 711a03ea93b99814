"""Idle processes use no processor time, after every kind of work."""

import pathlib
import tempfile
import time
import unittest

import pytest
from support import SUCCESS, NegativeTest, connect

SECONDS = 5.0
SETTLE_S = 0.5
# The limit is for 5 s. The engine may poll once more, and the clock has noise.
CPU_S_MAX = 0.01


def cpu_seconds(pid):
    """Processor time of all threads of a process, to the nanosecond."""
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@pytest.mark.alone
class Idle(NegativeTest):
    def busy_pair(self):
        """Two processes that have just streamed to each other and polled continuously, like benchmarks."""
        left, right, _, region = self.pair()
        left.mr("s", "anon", 2 << 14)
        left("stream", "q", "s", region["addr"], region["rkey"])
        time.sleep(0.2)
        self.assertEqual(left("stop", "q")["status"], SUCCESS)
        return left, right

    def test_idle_processes_use_no_processor_time(self):
        """All cases run concurrently, so that the test takes five seconds instead of a minute."""
        idle = {"with an open device": self.start()}
        idle["after it polled"], idle["after it was read and written"] = self.busy_pair()
        idle["with an armed queue"], idle["at the other end of it"] = self.pair()[:2]
        idle["with an armed queue"]("arm", "q")
        idle["with an armed queue"].send("wait", "q", 60)
        self.addCleanup(idle["with an armed queue"].kill)
        woken, waker = self.pair()[:2]
        woken("recv", "q", 1, "m", 0, 64)
        woken("arm", "q")
        waker("post", "q", "send", 1, "m", 0, 64, 0, 0)
        woken("wait", "q", 5)
        waker.status("q")
        woken("arm", "q")
        idle["after an event"], idle["after it sent one message"] = woken, waker

        with tempfile.TemporaryDirectory() as directory:
            plan = pathlib.Path(directory) / "plan.toml"
            plan.write_text("loss = 0.01\nreorder = 0.1\nreorder_us_max = 100\ndelay_us_max = 50\n")
            faulty, peer = self.start(None, "--fault-plan", plan, "--pcap", pathlib.Path(directory) / "x.pcap"), self.start()
            for end in (faulty, peer):
                end.mr("m", "anon", 65536)
            connect(faulty, "q", peer, "q")
            faulty("recv", "q", 1, "m", 0, 64)
            peer("post", "q", "send", 1, "m", 0, 64, 0, 0)
            self.assertEqual(peer.status("q"), SUCCESS)
            idle["with a fault plan and a capture"] = faulty

            survivor, victim, _, region = self.pair(timeout=8, retry=1)
            victim.kill()
            survivor("post", "q", "write", 1, "m", 0, 8, region["addr"], region["rkey"])
            survivor.status("q")
            idle["with a queue pair in error"] = survivor

            parent = self.start()
            child = parent("fork", "exit")["pid"]
            parent("reap", child)
            idle["after a fork"] = parent

            time.sleep(SETTLE_S)
            before = {name: cpu_seconds(end.pid) for name, end in idle.items()}
            self.assertGreater(min(before.values()), 0, "the clock does not count")
            time.sleep(SECONDS)
            used = {name: cpu_seconds(end.pid) - before[name] for name, end in idle.items()}
        self.assertEqual({name: f"{seconds * 1000:.1f} ms" for name, seconds in used.items() if seconds > CPU_S_MAX}, {})


if __name__ == "__main__":
    unittest.main()
