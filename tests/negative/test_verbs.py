"""Every verb with invalid attributes returns the errno of the man page and does not crash."""

import os
import re
import subprocess
import unittest

from support import PROGRAMS, NegativeTest, fill, fresh_address, procs


class Verbs(NegativeTest):
    def check(self, name, *arguments, options=(), stderr=subprocess.PIPE, least):
        """Runs a program that checks many calls and prints the failed ones. Returns its standard error, if that is not another's."""
        command = procs.under_terrace([str(PROGRAMS / name), *arguments], *options, addr=fresh_address())
        outcome = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60)
        said = (outcome.stdout + (outcome.stderr or "")).strip()
        self.assertEqual(outcome.returncode, 0, said)
        checks, failed = map(int, re.search(r"(\d+) checks, (\d+) failed", said).groups())
        self.assertEqual(failed, 0, said)
        self.assertGreaterEqual(checks, least, "the program made fewer checks than expected")
        return outcome.stderr

    def test_device_port_and_tables(self):
        self.check("verbs_device", least=300)

    def test_regions_windows_and_advice(self):
        self.check("verbs_memory", least=90)

    def test_completion_queues_channels_shared_receives_and_addresses(self):
        self.check("verbs_queues", least=1000)

    def test_queue_pairs_and_their_transitions(self):
        self.check("verbs_qp", least=5000)

    def test_queue_pairs_where_the_path_mtu_is_limited(self):
        self.check("verbs_qp", options=["--mtu", "1024"], least=5000)

    def test_extended_reliable_connections(self):
        self.check("verbs_xrc", least=90)

    def test_work_requests(self):
        self.check("verbs_post", least=1000)

    def test_semantics_common_to_devices(self):
        self.check("verbs_semantics", least=230)

    def test_details_of_the_man_pages(self):
        self.check("verbs_man_pages", least=460)

    def test_cancelled_threads_leave_no_locks(self):
        for options in (["--path", "udp"], ["--path", "auto"], ["--dram", "64M"]):
            with self.subTest(options=options):
                self.check("verbs_cancel", options=options, least=1000)

    def test_no_descriptors_left(self):
        said = self.check("exhaustion", "descriptors", least=20)
        self.assertIn("raise the limit with `ulimit -n`", said)

    def test_no_address_space_left(self):
        said = self.check("exhaustion", "memory", least=100)
        self.assertIn("raise the limit with `ulimit -v`", said)

    def test_no_address_space_left_and_no_reader_of_that_line(self):
        """The line that tells of it is lost: the program neither waits nor gets SIGPIPE."""
        for is_read in (True, False):
            with self.subTest(is_read=is_read):
                reader, writer = os.pipe()
                try:
                    if is_read:
                        fill(f"/proc/self/fd/{writer}")
                    else:
                        os.close(reader)
                    self.check("exhaustion", "memory", stderr=writer, least=100)
                finally:
                    os.close(writer)
                    if is_read:
                        os.close(reader)


if __name__ == "__main__":
    unittest.main()
