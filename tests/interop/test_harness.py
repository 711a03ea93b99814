"""Tests of the harness: `build/tools/bin/pytest tests/interop/test_harness.py`. They need no RDMA."""

import collections
import contextlib
import io
import json
import os
import pathlib
import socket
import struct
import sys
import tempfile
import unittest
from unittest import mock

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "scripts"), str(HERE / "kernel"), str(HERE.parent / "negative")]

import cases  # noqa: E402
import faults  # noqa: E402
import capture  # noqa: E402
import guests  # noqa: E402
import matrix  # noqa: E402
import peers  # noqa: E402
import pyverbs_suite  # noqa: E402
import roce  # noqa: E402
import run as kernel_run  # noqa: E402
import special  # noqa: E402
from harness import endpoint, perftest, procs  # noqa: E402

BANDWIDTH = """\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      5000             3312.11            3304.98		   0.052880
---------------------------------------------------------------------------------------
"""
LATENCY = """\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 2       1000          6.05           131.30       6.35     	       6.52        	3.91   		8.06    		131.30 
 4       1000          6.15           13.30       6.36     	       6.53        	0.91   		8.07    		13.30 
"""


class PerftestTables(unittest.TestCase):
    def test_bandwidth(self):
        (row,) = perftest.parse_table(BANDWIDTH)
        self.assertEqual(perftest.average_mib_s(row), 3304.98)
        self.assertEqual(perftest.messages_per_s(row), 52880)

    def test_latency(self):
        rows = perftest.parse_table(LATENCY)
        self.assertEqual([row["#bytes"] for row in rows], [2, 4])
        self.assertEqual(perftest.typical_us(rows[1]), 6.36)
        self.assertEqual(rows[0]["99% percentile[usec]"], 8.06)

    def test_no_table(self):
        self.assertEqual(perftest.parse_table("Unable to find the Infiniband/RoCE device\n"), [])

    def test_a_zero_is_an_error(self):
        zero = BANDWIDTH.replace("3304.98", "0.00")
        self.assertIn("zero", cases.table_rows(1)({"client": cases.procs.Outcome([], 0, 0, zero)}))
        self.assertIsNone(cases.table_rows(1)({"client": cases.procs.Outcome([], 0, 0, BANDWIDTH)}))
        self.assertIn("instead of 2", cases.table_rows(2)({"client": cases.procs.Outcome([], 0, 0, BANDWIDTH)}))


class Programs(unittest.TestCase):
    def test_a_listener_is_found_without_connecting(self):
        with contextlib.closing(socket.socket()) as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            self.assertFalse(procs.is_listening(port))
            listener.listen()
            self.assertTrue(procs.is_listening(port))
        self.assertFalse(procs.is_listening(port))

    def test_a_hanging_program_is_stopped(self):
        with tempfile.TemporaryDirectory() as directory:
            outcome = procs.run_one(["sleep", "60"], directory, timeout_s=0.2)
            self.assertIsNone(outcome.status)
            self.assertLess(outcome.seconds, 10)

    def test_a_server_that_never_listens_is_reported(self):
        with tempfile.TemporaryDirectory() as directory:
            pair = procs.run_pair(["false"], ["true"], procs.free_port(), directory)
            self.assertEqual((pair.note, pair.server.status), ("the server never listened", 1))


class ExitStatuses(unittest.TestCase):
    """A stopped program must end with an expected status. An unexpected status is never lost."""

    LISTENS_THEN_ABORTS = ("import os, signal, socket, sys\n"
                           "signal.signal(signal.SIGTERM, lambda *_: os.abort())\n"
                           "listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
                           "signal.pause()\n")

    def stop(self, script, is_late=False):
        with tempfile.TemporaryDirectory() as directory:
            program = procs.Program(["sh", "-c", script], directory, "program")
            while "ready" not in program.paths[0].read_text():
                self.assertIsNone(program.wait(0.02))
            program.stop(is_late)

    def test_expected_statuses(self):
        for script in ("echo ready; exec sleep 60", "trap 'exit 0' TERM; echo ready; sleep 60 & wait"):
            self.stop(script)

    def test_crashes_and_statuses_at_the_end(self):
        for how, said in (("kill -SEGV $$", "SIGSEGV"), ("exit 3", "exit status 3"), ("true", "SIGKILL")):
            with self.subTest(how=how), self.assertRaisesRegex(AssertionError, said):
                self.stop(f"trap '{how}' TERM; echo ready; while true; do sleep 60 & wait; done")

    def test_a_late_program(self):
        """A late program has failed already, so stopping it raises only after a crash."""
        late = "trap '{}' TERM; echo ready; while true; do sleep 60 & wait; done"
        self.stop(late.format("exit 3"), is_late=True)
        with self.assertRaisesRegex(AssertionError, "SIGSEGV"):
            self.stop(late.format("kill -SEGV $$"), is_late=True)

    def test_a_program_that_has_ended_before(self):
        with tempfile.TemporaryDirectory() as directory:
            program = procs.Program(["sh", "-c", "kill -ABRT $$"], directory, "program")
            program.process.wait()
            with self.assertRaisesRegex(AssertionError, "SIGABRT"):
                program.stop()

    def test_a_permanent_server_must_not_crash(self):
        port = procs.free_port()
        server = [sys.executable, "-c", self.LISTENS_THEN_ABORTS, str(port)]
        with tempfile.TemporaryDirectory() as directory, self.assertRaisesRegex(AssertionError, "SIGABRT"):
            procs.run_pair(server, ["true"], port, directory, is_server_permanent=True)

    def test_an_endpoint(self):
        with mock.patch.object(procs, "under_terrace", side_effect=lambda argv, **_: argv):
            endpoint.Endpoint("", program=["sh", "-c", "cat"]).stop()
            for how, said in (("kill -SEGV $$", "-11"), ("exit 3", "3")):
                with self.subTest(how=how), self.assertRaisesRegex(AssertionError, said):
                    endpoint.Endpoint("", program=["sh", "-c", f"cat; {how}"]).stop()
            killed = endpoint.Endpoint("", program=["cat"])
            killed.kill()
            killed.stop()


class Verdicts(unittest.TestCase):
    CASE = cases.Case("x", unsupported="tag matching")

    def judge(self, status, text):
        return self.CASE._evaluate_unsupported({"server": procs.Outcome([], status, 0, "", text)})

    def test_an_unsupported_feature_needs_an_error_message(self):
        self.assertEqual(self.judge(1, "Couldn't create the queue\n")[0], cases.SKIPPED)
        self.assertEqual(self.judge(1, "")[0], cases.FAILED)
        self.assertEqual(self.judge(-11, "boom\n")[0], cases.FAILED)
        self.assertEqual(self.judge(None, "waiting\n")[0], cases.FAILED)
        self.assertIn("remove it from that list", self.judge(0, "fine\n")[1])

    def test_names_are_unique(self):
        names = [case.name for case in matrix.all_cases()]
        self.assertEqual(len(names), len(set(names)))

    def test_a_result_ends_a_test_of_pytest(self):
        recorded = mock.Mock()
        cases.Result("a", cases.PASSED).conclude(recorded, pathlib.Path("out"))
        with self.assertRaisesRegex(pytest.skip.Exception, "no fork"):
            cases.Result("a", cases.SKIPPED, "no fork").conclude(recorded, pathlib.Path("out"))
        with self.assertRaisesRegex(pytest.fail.Exception, "wrong\noutput: out/a"):
            cases.Result("a", cases.FAILED, "wrong").conclude(recorded, pathlib.Path("out"))
        recorded.assert_not_called()


class Repetitions(unittest.TestCase):
    """A case of an unreliable service is repeated only if the kernel has dropped a packet."""

    CASE = next(case for case in matrix.all_cases() if case.name == "perftest/ib_send_bw/UD/default")

    def run_case(self, *tries):
        """The result of a case whose tries have these outcomes, and the number of tries."""
        with tempfile.TemporaryDirectory() as directory, mock.patch.object(cases.shutil, "which", return_value="/bin/true"), \
                mock.patch.object(cases.Case, "_execute", side_effect=[(outcomes, "") for outcomes in tries]) as execute:
            result = self.CASE.run(pathlib.Path(directory) / "case")
        return result, execute.call_count

    @staticmethod
    def ends(status, out="", **more):
        return {end: procs.Outcome([], status, 0, out, **more) for end in ("server", "client")}

    def test_no_repetition_without_a_dropped_packet(self):
        for ends in (self.ends(None), self.ends(0, BANDWIDTH.replace("3304.98", "0.00"))):
            result, tries = self.run_case(*[ends] * 3)
            self.assertEqual((result.status, tries), (cases.FAILED, 1))

    def test_a_repetition_is_counted(self):
        result, tries = self.run_case(self.ends(None, has_overflowed=True), self.ends(0, BANDWIDTH))
        self.assertEqual((result.status, tries), (cases.PASSED, 2))
        self.assertIn("flaky", result.reason)
        recorded = mock.Mock()
        result.conclude(recorded, pathlib.Path())
        recorded.assert_called_once_with("flaky", result.reason)

    def test_a_completion_that_was_not_there_is_a_cause(self):
        unset, failed = (self.ends(1, f" Failed status {status}: wr_id 3 syndrom 0x7f\n") for status in (21845, 12))
        reliable = next(case for case in matrix.all_cases() if case.name == "perftest/ib_send_lat/XRC/events")
        with mock.patch.object(self, "CASE", reliable):
            result, tries = self.run_case(unset, self.ends(0, BANDWIDTH))
            self.assertEqual((result.status, result.is_flaky, tries), (cases.PASSED, True, 2))
            result, tries = self.run_case(failed, self.ends(0, BANDWIDTH))
            self.assertEqual((result.status, tries), (cases.FAILED, 1))

    def test_repetitions_are_limited(self):
        result, tries = self.run_case(*[self.ends(None, has_overflowed=True)] * 4)
        self.assertEqual((result.status, tries), (cases.FAILED, 3))


class FakeGuest:
    """A guest that dies when a test sets `is_dead`."""

    is_dead = False

    def __init__(self, directory):
        self.log_dir = self.console_path = pathlib.Path(directory)

    def begin_capture(self, path):
        path.touch()

    def end_capture(self):
        if self.is_dead:
            raise OSError("broken pipe")

    def has_ended(self):
        return self.is_dead

    def death(self):
        return "it is dead" if self.is_dead else None

    def close(self):
        pass

    def last_output(self):
        return "BUG: unable to handle page fault"


class KernelRuns(unittest.TestCase):
    """Runs against the kernel with tests that fail, are skipped, or kill the guest."""

    def run_tests(self, *bodies, **environment):
        """Runs pytest with tests of these bodies. Returns its exit status, its results by name, what the plugin says, and the number of
        guests started."""
        started, outcomes = [], collections.Counter()
        with contextlib.ExitStack() as stack:
            directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(mock.patch.dict("os.environ", {guests.MUST_RUN: "", **environment}))
            stack.enter_context(mock.patch.object(peers, "repetitions", {}))
            stack.callback(setattr, peers, "guest", None)
            peers.guest = None

            def start_guest():
                started.append(FakeGuest(directory))
                peers.guest = started[-1]

            class Count:
                def pytest_runtest_logreport(self, report):
                    if report.when == "call" or report.outcome == "skipped":
                        outcomes[report.outcome] += 1

            (directory / "test_fake.py").write_text("import pytest\n\nBODIES = []\n\n\n@pytest.mark.parametrize('n', range(99))\n"
                                                    "def test_fake(n):\n    BODIES[n]()\n".replace("99", str(len(bodies))))
            plugin = guests.Guests(start_guest)
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(mock.patch.dict(sys.modules))

            class Bodies:
                def pytest_collection_finish(self, session):
                    session.items[0].module.BODIES.extend(bodies)

            options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", directory, "-c", os.devnull, directory]
            status = pytest.main([str(option) for option in options], plugins=[plugin, Count(), Bodies()])
        return status, dict(outcomes), "\n".join(plugin.lines), len(started), plugin.deaths

    @staticmethod
    def kills(times):
        """The body of a test that kills this many guests."""
        left = iter(range(times))

        def body():
            if next(left, None) is not None:
                peers.guest.is_dead = True
                raise OSError("no route to host")

        return body

    @staticmethod
    def fails():
        raise AssertionError("wrong data")

    @staticmethod
    def skips():
        raise unittest.SkipTest("no such module")

    def test_a_guest_that_dies_is_started_again(self):
        status, outcomes, said, started, deaths = self.run_tests(self.kills(1), lambda: None)
        self.assertEqual((status, outcomes, started, deaths), (0, {"passed": 2}, 2, 1))
        self.assertIn("BUG: unable", said)

    def test_a_guest_that_dies_twice_fails_the_test(self):
        status, outcomes, _, started, deaths = self.run_tests(self.kills(2), lambda: None)
        self.assertEqual((status, outcomes, started, deaths), (1, {"passed": 1, "failed": 1}, 3, 2))

    def test_guest_deaths_are_limited(self):
        status, outcomes, _, _, deaths = self.run_tests(*(self.kills(1) for _ in range(guests.DEATHS_MAX + 1)))
        self.assertEqual((status, outcomes, deaths), (1, {"passed": 3, "failed": 1}, 4))

    def test_a_failure_is_not_repeated(self):
        status, outcomes, _, started, deaths = self.run_tests(self.fails, lambda: None)
        self.assertEqual((status, outcomes, started, deaths), (1, {"passed": 1, "failed": 1}, 1, 0))

    def test_skipped_is_not_passed(self):
        self.assertEqual(self.run_tests(self.skips, lambda: None, TERRACE_MUST_RUN="1")[:2], (0, {"skipped": 1, "passed": 1}))
        self.assertEqual(self.run_tests(self.skips)[0], 0)
        self.assertEqual(self.run_tests(self.skips, TERRACE_MUST_RUN="1")[:2], (1, {"skipped": 1}))

    def test_a_machine_without_support_fails_if_it_must_run(self):
        for must_run, status in (("", 0), ("1", 1)):
            with mock.patch.dict("os.environ", {guests.MUST_RUN: must_run}), mock.patch.object(kernel_run, "reason_to_skip", return_value="no tun"), \
                    contextlib.redirect_stdout(io.StringIO()) as said:
                self.assertEqual(kernel_run.main(), status)
            self.assertIn("all skipped", said.getvalue())


class Captures(unittest.TestCase):
    """A capture shows whether rxe waits for an ACK that was sent to it."""

    RXE, HOST = ("192.0.2.2", roce.PORT), ("192.0.2.16", roce.PORT)

    def frame(self, source, destination, body):
        crc = roce.icrc(source, destination, body)
        ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 28 + len(body) + 4, 0, 0x4000, 64, 17, 0,
                         *(socket.inet_aton(end[0]) for end in (source, destination)))
        return bytes(12) + b"\x08\x00" + ip + struct.pack("!HHHH", source[1], destination[1], 12 + len(body), 0) + body + crc

    def all_acknowledged(self, *packets):
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"\xd4\xc3\xb2\xa1" + bytes(20))
            for packet in packets:
                frame = self.frame(*packet)
                file.write(struct.pack("<IIII", 0, 0, len(frame), len(frame)) + frame)
            file.flush()
            return capture.all_acknowledged(file.name, *(socket.inet_aton(end[0]) for end in (self.RXE, self.HOST)))

    def test_an_ack_of_the_last_request(self):
        def send(psn):
            return self.RXE, self.HOST, roce.bth(roce.SEND_ONLY, 7, psn, ack=True) + bytes(8)

        def answer(psn, syndrome=roce.ACK):
            return self.HOST, self.RXE, roce.bth(roce.ACKNOWLEDGE, 9, psn) + roce.aeth(syndrome)

        self.assertTrue(self.all_acknowledged(send(0xFFFFFF), send(0), answer(0xFFFFFF), answer(0), send(0xFFFFFF), send(0)))
        self.assertFalse(self.all_acknowledged(send(0xFFFFFF), send(0), answer(0xFFFFFF)))
        self.assertFalse(self.all_acknowledged(send(1), send(2), answer(2, roce.NAK_SEQUENCE)))
        self.assertFalse(self.all_acknowledged())


class FaultPlans(unittest.TestCase):
    """An error of a program is a failure under every plan."""

    COUNTS = ", ".join(f"{count} 9" for _, count in faults.KINDS.values())

    def error_of(self, case):
        server = procs.Outcome([], 0, 0, "", f"terrace: fault plan x has injected: {self.COUNTS}\n")
        client = procs.Outcome([], 1, 0, f"Failed status {faults.RETRY_EXCEEDED} (12) for wr_id 2\n")
        with tempfile.TemporaryDirectory() as directory, \
                mock.patch.object(procs, "run_pair", return_value=procs.PairOutcome(server, client)) as run_pair:
            complaint = case(pathlib.Path(directory))
        self.assertEqual(run_pair.call_count, 1)
        return complaint

    def test_an_exceeded_retry_count_is_a_failure(self):
        for kind in faults.KINDS:
            with self.subTest(kind=kind):
                self.assertIn(faults.RETRY_EXCEEDED, str(self.error_of(faults.one_kind(kind))))

    def test_an_exceeded_retry_count_fails_the_validating_pingpong(self):
        self.assertIn(faults.RETRY_EXCEEDED, str(self.error_of(special.validated_under_faults)))


class Pyverbs(unittest.TestCase):
    OUTCOMES = {"a": ("passed", "", 0), "b": ("failed", "Traceback\nValueError: 7", 0), "c": ("skipped", "no luck", 0),
                "tests.test_tag_matching.x": ("skipped", "no tag matching", 0)}

    def statuses(self, expected):
        return {result.name: result.status for result in pyverbs_suite.evaluate(self.OUTCOMES, expected)}

    def test_a_regression_is_reported_by_name(self):
        got = self.statuses(["a", "b", "c", "d"])
        self.assertEqual(got, {"pyverbs/a": "passed", "pyverbs/b": "failed", "pyverbs/c": "failed", "pyverbs/d": "failed",
                               "pyverbs/tests.test_tag_matching.x": "skipped"})

    def test_a_failure_outside_of_the_list_counts(self):
        self.assertEqual(self.statuses([])["pyverbs/b"], "failed")

    def test_skipped_tests_have_a_reason_in_the_list(self):
        got = {result.name: result for result in pyverbs_suite.evaluate(self.OUTCOMES, [])}
        self.assertEqual(got["pyverbs/c"].status, "failed")
        self.assertIn("not in pyverbs-skipped.txt", got["pyverbs/c"].reason)
        self.assertEqual(got["pyverbs/tests.test_tag_matching.x"].status, "skipped")
        self.assertIn("tag matching in the NIC", got["pyverbs/tests.test_tag_matching.x"].reason)
        self.assertTrue(all(pattern and reason for pattern, reason in pyverbs_suite.skip_reasons()))

    def test_tests_that_need_huge_pages_may_be_skipped_for_that(self):
        outcomes = {"a": ("skipped", "There are no huge pages of size 2M allocated", 0)}
        self.assertEqual(pyverbs_suite.evaluate(outcomes, ["a"])[0].status, "skipped")

    def test_a_crashed_test_is_reported(self):
        lines = [{"start": "a"}, {"end": "a", "outcome": "passed", "why": ""}, {"start": "b"}]
        with tempfile.TemporaryDirectory() as directory:
            file = pathlib.Path(directory) / "results"
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
            self.assertEqual(pyverbs_suite._read(file), {"a": ("passed", "", 0.0), "b": (None, "", 0.0)})


if __name__ == "__main__":
    unittest.main()
