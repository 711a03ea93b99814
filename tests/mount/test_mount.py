"""What users see of `terrace mount` beyond files: ordinary users, signals, servers that end or stop, other clients."""

import contextlib
import errno
import fcntl
import mmap
import os
import pathlib
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
import unittest

import place

NOBODY = 65534


# In Perl, which every user of Debian may run: this Python may be below a directory of root's.
TRUNCATE_WITHOUT_RIGHT = """
my ($path) = @ARGV;
open(my $file, ">>", $path) or die $!;
chmod(0400, $path) && truncate($file, 100) or die $!;
die "the path was truncated without the right" if truncate($path, 200);
die $! unless $!{EACCES} && -s $file == 100;
"""


# A thread waits for a lock, and gets a signal. The main thread is idle.
LOCKS_IN_A_THREAD = """
import ctypes, fcntl, os, signal, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGUSR1, lambda *_: None)
file = os.open(sys.argv[1], os.O_RDWR)
def wait():
    print(libc.flock(file, fcntl.LOCK_EX), ctypes.get_errno(), flush=True)
thread = threading.Thread(target=wait)
thread.start()
time.sleep(0.5)
signal.pthread_kill(thread.ident, signal.SIGUSR1)
thread.join()
"""


class Writer:
    """A process with an open file. This process must not have it open: a server that it starts would close the file between
    fork and exec, which waits for the server."""

    CODE = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
print(0, flush=True)
calls = {"fsync": lambda: os.fsync(file), "lock": lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB),
         "wait": lambda: fcntl.flock(file, fcntl.LOCK_EX), "unlock": lambda: fcntl.flock(file, fcntl.LOCK_UN)}
for line in sys.stdin:
    text = line[:-1]
    try:
        calls.get(text, lambda: os.write(file, text.encode()))()
        print(0, flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""

    def __init__(self, path):
        self.process = subprocess.Popen([sys.executable, "-c", self.CODE, path], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        self.answer()
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()

    def answer(self):
        return int(self.process.stdout.readline())

    def ask(self, text):
        """Writes the text, or calls fsync. Returns the error number, or 0."""
        self.begin(text)
        return self.answer()

    def begin(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def has_answered(self, seconds):
        return bool(select.select([self.process.stdout], [], [], seconds)[0])


@unittest.skipUnless(os.path.exists("/dev/fuse"), "this machine has no FUSE")
class Mounts(unittest.TestCase):
    def test_sigterm_unmounts_and_everything_is_on_the_server(self):
        with place.mounted() as at:
            (at.path / "file").write_text("kept")
            with Writer(at.path / "open") as writer:
                self.assertEqual(writer.ask("dirty"), 0)
                self.assertEqual(at.mount.stop(), 0)
                self.assertFalse(place.is_mounted(at.path))
                self.assertEqual((at.directory / "file").read_text(), "kept")
                self.assertEqual((at.directory / "open").read_text(), "dirty")
                self.assertNotEqual(writer.ask("more"), 0)

    def test_what_is_below_the_mount_stays(self):
        with place.mounted() as at, below(at) as path:
            mount = again(at, path)
            mount.start()
            self.assertEqual(mount.stop(), 0)
            self.assertTrue((path / "below").exists())

    def test_what_is_mounted_in_its_place_stays(self):
        with place.mounted() as at, below(at) as path:
            mount = again(at, path)
            mount.start()
            busy = os.open(path / "busy", os.O_CREAT | os.O_WRONLY)
            subprocess.run(["umount", "--lazy", path], check=True)
            self.assertEqual(mount.stop(), 0)
            # Its mount has ended.
            with self.assertRaises(OSError):
                os.close(busy)
            self.assertTrue((path / "below").exists())

    def test_a_file_is_no_mount_point(self):
        with place.mounted() as at:
            path = at.path.parent / "file"
            path.touch()
            command = [place.TERRACE, "mount", at.mount.command[2], path, "--addr", next(place.ADDRESSES)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            self.assertEqual(done.returncode, 1)
            self.assertIn("not a directory", done.stderr)

    def test_without_the_device_the_command_says_so(self):
        with place.mounted() as at:
            path = at.path.parent / "second"
            path.mkdir()
            hidden = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev && exec "$@"', "sh")
            command = [*hidden, place.TERRACE, "mount", at.mount.command[2], path, "--addr", next(place.ADDRESSES)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            self.assertEqual(done.returncode, 1)
            self.assertIn("there is no /dev/fuse: modprobe fuse", done.stderr)

    def test_the_command_sleeps_until_its_end(self):
        with place.mounted() as at:
            status = pathlib.Path(f"/proc/{at.mount.process.pid}/status")

            def wakeups():
                return status.read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0]

            time.sleep(0.2)
            before = wakeups()
            time.sleep(0.5)
            self.assertEqual(wakeups(), before)

    def test_umount_ends_the_command(self):
        with place.mounted() as at:
            subprocess.run(["umount", at.path], check=True)
            self.assertEqual(at.mount.process.wait(timeout=10), 0)

    def test_a_mount_point_whose_command_was_killed_can_be_used_again(self):
        with place.mounted() as at:
            at.mount.stop(signal.SIGKILL)
            with self.assertRaises(OSError):
                os.listdir(at.path)
            at.mount.start()
            place.wait_until("the new mount", lambda: works(at.path))
            self.assertEqual(os.listdir(at.path), [])

    def test_a_mount_point_whose_command_is_stopped_is_an_error_in_bounded_time(self):
        with place.mounted() as at:
            at.mount.process.send_signal(signal.SIGSTOP)
            try:
                done = subprocess.run(at.mount.command, capture_output=True, text=True, check=False, timeout=60)
            finally:
                at.mount.process.send_signal(signal.SIGCONT)
            self.assertEqual(done.returncode, 1)
            self.assertIn("its process does not answer: end it, or unmount it", done.stderr)
            (at.path / "file").write_text("as before")

    def test_an_ordinary_user_mounts_and_owns_the_files(self):
        with place.temporary() as base:
            exported, path = base / "exported", base / "mounted"
            directory = exported / "a,b"  # fusermount3 splits its options at commas
            for made in (exported, directory, path):
                made.mkdir()
                os.chown(made, NOBODY, NOBODY)
            server, client = next(place.ADDRESSES), next(place.ADDRESSES)
            export = place.Export(exported, server)
            program = shutil.copy(place.TERRACE, base / "terrace")  # the checkout may be below a directory of root's
            command = [program, "mount", f"{server}:/a,b", path, "--addr", client]
            mount = place.Mount(command, path, user=NOBODY, group=NOBODY, extra_groups=[], env={"PATH": os.environ["PATH"]})
            try:
                export.start()
                mount.start()
                subprocess.run(["sh", "-c", f"echo a >{path}/file"], check=True, user=NOBODY, group=NOBODY)
                self.assertEqual((directory / "file").stat().st_uid, NOBODY)
                with self.assertRaises(PermissionError):
                    os.listdir(path)  # root is another user
                # The names of a directory that its owner may read and not search: their attributes are nobody's to see.
                listed = directory / "listed"
                listed.mkdir()
                for number in range(200):
                    (listed / str(number)).touch()
                os.chown(listed, NOBODY, NOBODY)
                listed.chmod(0o400)
                names = subprocess.run(["ls", path / "listed"], stdout=subprocess.PIPE, check=True, text=True, user=NOBODY, group=NOBODY)
                self.assertEqual(len(names.stdout.split()), 200)
                shown = subprocess.run(["cat", path / "listed/7"], capture_output=True, check=False, text=True, user=NOBODY, group=NOBODY)
                self.assertIn("Permission denied", shown.stderr)
                # An open file keeps the right with which it was opened; its path has the one that the mode gives.
                subprocess.run(["perl", "-e", TRUNCATE_WITHOUT_RIGHT, path / "file"], check=True, user=NOBODY, group=NOBODY)
                subprocess.run(["fusermount3", "-u", path], check=True, user=NOBODY, group=NOBODY)
                self.assertEqual(mount.process.wait(timeout=10), 0)
            finally:
                if place.is_mounted(path):
                    subprocess.run(["umount", "--lazy", path], check=False)
                export.stop()

    def test_requests_wait_for_a_server_that_restarts(self):
        with place.mounted() as at, Writer(at.path / "file") as writer:
            self.assertEqual(writer.ask("before "), 0)
            self.assertEqual(writer.ask("fsync"), 0)
            at.export.stop(signal.SIGKILL)
            self.assertEqual(writer.ask("while "), 0)
            at.export.start()
            self.assertEqual(writer.ask("after"), 0)
            self.assertEqual(writer.ask("fsync"), 0)
            self.assertEqual((at.directory / "file").read_bytes(), b"before while after")

    def test_a_server_that_stays_away_is_an_error_in_bounded_time(self):
        with place.mounted(options=("--timeout", "2", "--cache", "0")) as at, Writer(at.path / "file") as writer:
            at.export.stop(signal.SIGKILL)
            self.assertEqual(writer.ask("lost"), 0)
            begin = time.monotonic()
            self.assertEqual(writer.ask("fsync"), errno.EIO)
            with self.assertRaises(OSError):
                os.listdir(at.path)
            self.assertLess(time.monotonic() - begin, 15)
            at.export.start()
            place.wait_until("the server", lambda: works(at.path))
            self.assertEqual(writer.ask("kept"), 0)
            self.assertEqual(writer.ask("fsync"), 0)
            self.assertEqual((at.directory / "file").read_bytes(), b"\0\0\0\0kept")

    def test_a_server_that_stays_away_is_waited_for_once_for_all_that_is_dirty(self):
        with place.mounted(options=("--timeout", "2")) as at:
            scattered = os.open(at.path / "file", os.O_CREAT | os.O_WRONLY)
            at.export.stop(signal.SIGKILL)
            for number in range(200):
                os.pwrite(scattered, b"lost", number * 10_000)
            begin = time.monotonic()
            with self.assertRaises(OSError) as failure:
                os.fsync(scattered)
            self.assertEqual(failure.exception.errno, errno.EIO)
            self.assertLess(time.monotonic() - begin, 15)
            at.export.start()
            os.close(scattered)

    def test_a_place_in_a_listing_is_found_again(self):
        with place.mounted() as at:
            for number in range(1000):
                (at.directory / str(number)).touch()
            program = shutil.which("perl")
            self.assertIsNotNone(program, "perl is part of every Debian")
            walk = ('opendir(D, $ARGV[0]); sub skip { scalar readdir D for 1..shift } skip(700); $place = telldir D;'
                    '@rest = sort(readdir D); rewinddir D; skip(100); $early = telldir D; skip(100); seekdir(D, $early);'
                    'skip(10); seekdir(D, $place); @again = sort(readdir D);'
                    'print scalar(@rest), " ", "@rest" eq "@again" ? "same" : "other";')
            done = subprocess.run([program, "-e", walk, at.path], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
            self.assertEqual(done.stdout, "302 same")

    def test_a_stopped_server_is_an_error_in_bounded_time(self):
        with place.mounted(options=("--timeout", "2", "--cache", "0")) as at:
            os.kill(at.export.process.pid, signal.SIGSTOP)
            begin = time.monotonic()
            with self.assertRaises(OSError) as failure:
                os.listdir(at.path)
            self.assertEqual(failure.exception.errno, errno.EIO)
            self.assertLess(time.monotonic() - begin, 10)
            os.kill(at.export.process.pid, signal.SIGCONT)
            place.wait_until("the server", lambda: works(at.path))

    def test_what_one_client_has_closed_another_finds_when_it_opens(self):
        with place.mounted() as at, mounted_again(at) as second:
            for number in range(20):
                text = f"{number} " * (number + 1)
                writer, reader = (at.path, second) if number % 2 else (second, at.path)
                with open(writer / "file", "w", encoding="utf-8") as file:
                    file.write(text)
                with open(reader / "file", encoding="utf-8") as file:
                    self.assertEqual(file.read(), text)

    def test_a_hole_before_bytes_that_are_written_behind_is_zeros(self):
        with place.mounted() as at:
            for flags in (0, os.O_DIRECT):
                file = os.open(at.path / f"file{flags}", os.O_CREAT | os.O_RDWR | flags)
                written, found = mmap.mmap(-1, 4096), mmap.mmap(-1, 4096)
                try:
                    # Each read is of a new hole, because it has the bytes written that make it one.
                    for end in (1 << 20, 2 << 20, 3 << 20):
                        self.assertEqual(os.pwrite(file, written, end), 4096)
                        self.assertEqual(os.preadv(file, [found], end - (1 << 19)), 4096)
                        self.assertEqual(os.lseek(file, 0, os.SEEK_END), end + 4096)
                finally:
                    os.close(file)

    def test_the_lock_of_an_open_file_description_ends_with_it(self):
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 10, 0)

        def has_lock(file):
            try:
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
                return True
            except BlockingIOError:
                return False

        with place.mounted() as at:
            first, second = (os.open(at.path / "file", os.O_CREAT | os.O_RDWR) for _ in range(2))
            self.assertTrue(has_lock(first))
            os.close(os.dup(first))
            self.assertFalse(has_lock(second))
            os.close(first)
            place.wait_until("the lock", lambda: has_lock(second))
            os.close(second)

    def test_a_thread_that_waits_for_a_lock_is_interrupted(self):
        with place.mounted() as at:
            with Writer(at.path / "file") as holder:
                self.assertEqual(holder.ask("lock"), 0)
                waiter = subprocess.Popen([sys.executable, "-c", LOCKS_IN_A_THREAD, at.path / "file"], stdout=subprocess.PIPE, text=True)
                was_interrupted = bool(select.select([waiter.stdout], [], [], 20)[0])
            self.assertEqual(waiter.communicate(timeout=60)[0], f"-1 {errno.EINTR}\n")
            self.assertTrue(was_interrupted)

    def test_a_program_waits_for_a_lock_of_a_mount_in_another_process_name_space(self):
        with place.mounted() as at:
            path = at.path.parent / "second"
            path.mkdir()
            mount = again(at, path)
            mount.command = ["unshare", "--pid", "--fork", *mount.command]
            mount.start()
            try:
                with Writer(path / "file") as holder, Writer(path / "file") as waiter:
                    self.assertEqual(holder.ask("lock"), 0)
                    waiter.begin("wait")
                    self.assertFalse(waiter.has_answered(1))
                    self.assertEqual(holder.ask("unlock"), 0)
                    self.assertEqual(waiter.answer(), 0)
            finally:
                subprocess.run(["umount", path], check=False)
                mount.process.wait(timeout=20)

    def test_programs_that_wait_for_locks_do_so_in_bounded_time_if_the_server_is_stopped(self):
        with place.mounted(options=("--timeout", "2")) as at, mounted_again(at) as second, contextlib.ExitStack() as writers:
            waiters = [writers.enter_context(Writer(at.path / str(number))) for number in range(8)]
            holders = [writers.enter_context(Writer(second / str(number))) for number in range(8)]
            for holder, waiter in zip(holders, waiters, strict=True):
                self.assertEqual(holder.ask("lock"), 0)
                waiter.begin("wait")
            time.sleep(0.5)
            os.kill(at.export.process.pid, signal.SIGSTOP)
            try:
                begin = time.monotonic()
                for waiter in waiters:
                    self.assertEqual(waiter.answer(), errno.EIO)
                self.assertLess(time.monotonic() - begin, 10)
            finally:
                os.kill(at.export.process.pid, signal.SIGCONT)

    def test_a_lock_survives_a_server_that_restarts(self):
        with place.mounted() as at, mounted_again(at) as second, Writer(at.path / "file") as holder, \
                Writer(second / "file") as other:
            self.assertEqual(holder.ask("lock"), 0)
            for _ in range(3):
                at.export.stop(signal.SIGKILL)
                at.export.start()
                self.assertEqual(holder.ask("text"), 0)
                self.assertEqual(holder.ask("fsync"), 0)
                self.assertEqual(other.ask("lock"), errno.EAGAIN)
            self.assertEqual(holder.ask("unlock"), 0)
            self.assertEqual(other.ask("lock"), 0)

    def test_the_lock_of_a_mount_that_was_stopped_for_longer_than_its_lease_is_lost(self):
        with place.mounted(export_options=("--lease", "2")) as at, mounted_again(at) as second, \
                Writer(at.path / "file") as holder, Writer(second / "file") as other:
            self.assertEqual(holder.ask("lock"), 0)
            os.kill(at.mount.process.pid, signal.SIGSTOP)
            place.wait_until("the lock", lambda: other.ask("lock") == 0)
            self.assertEqual(other.ask("theirs"), 0)
            self.assertEqual(other.ask("fsync"), 0)
            self.assertEqual(other.ask("unlock"), 0)
            os.kill(at.mount.process.pid, signal.SIGCONT)
            self.assertEqual(holder.ask("mine"), 0)
            self.assertEqual(holder.ask("fsync"), errno.ENOLCK)
            self.assertEqual((at.directory / "file").read_bytes(), b"theirs")
            holder.ask("unlock")
            self.assertEqual(holder.ask("lock"), 0)

    def test_changes_on_the_server_are_seen(self):
        with place.mounted() as at:
            (at.directory / "file").write_text("first")
            self.assertEqual((at.path / "file").read_text(), "first")
            (at.directory / "file").write_text("second, and longer")
            place.wait_until("the change", lambda: (at.path / "file").read_text() == "second, and longer", 5)
            (at.directory / "file").unlink()
            place.wait_until("the removal", lambda: not (at.path / "file").exists(), 5)

    def test_a_listing_under_way_shows_what_programs_here_change(self):
        with place.mounted(options=("--cache", "60")) as at:
            names = [f"file{number}" for number in range(300)]
            for name in names:
                (at.path / name).write_text("short")
            # The kernel has a few names of a page that the mount keeps.
            with os.scandir(at.path) as listing:
                first = next(listing).name
                for name in names:
                    with open(at.path / name, "a", encoding="utf-8") as file:
                        file.write(" and longer")
                listed = {first, *(entry.name for entry in listing)}
            self.assertEqual(listed, set(names))
            for name in names:
                self.assertEqual((at.path / name).stat().st_size, len("short and longer"))
                self.assertEqual((at.path / name).read_text(), "short and longer")
            with os.scandir(at.path) as listing:
                first = next(listing).name
                removed = {name for name in names if name != first}
                for name in removed:
                    (at.path / name).unlink()
                for _ in listing:  # the rest of the page must not bring a removed name back
                    pass
            self.assertEqual([name for name in removed if (at.path / name).exists()], [])

    def test_a_listing_under_way_shows_links_that_change_elsewhere(self):
        with place.mounted(options=("--cache", "60")) as at:
            (at.path / "listed").mkdir()
            (at.path / "other").mkdir()
            names = [f"file{number}" for number in range(300)]
            for name in names:
                (at.path / "listed" / name).write_text("short")
            for links, change in (
                (2, lambda name: os.link(at.path / "listed" / name, at.path / "other" / name)),
                (1, lambda name: ((at.path / "other/new").write_text("new"),
                                  os.rename(at.path / "other/new", at.path / "other" / name))),
            ):
                with os.scandir(at.path / "listed") as listing:
                    next(listing)
                    for name in names:
                        change(name)
                    for _ in listing:  # the rest of the page must not bring a number of links back
                        pass
                counts = {os.stat(at.path / "listed" / name).st_nlink for name in names}
                self.assertEqual(counts, {links})

    def test_the_bytes_that_came_with_opening_a_file_are_not_older_than_a_write(self):
        with place.mounted() as at, mounted_again(at) as second:
            (second / "file").write_text("first")
            for text, is_closed in (("other", False), ("third", True)):
                reader = os.open(at.path / "file", os.O_RDONLY)
                writer = os.open(at.path / "file", os.O_WRONLY)
                os.pwrite(writer, text.encode(), 0)
                if is_closed:
                    os.close(writer)
                self.assertEqual(os.pread(reader, 100, 0), text.encode())
                if not is_closed:
                    os.close(writer)
                os.close(reader)

    def test_the_bytes_that_came_with_opening_a_file_are_not_older_than_a_lock(self):
        with place.mounted(options=("--cache", "60")) as at, mounted_again(at) as second:
            (second / "file").write_text("first")
            reader = os.open(at.path / "file", os.O_RDONLY)
            with open(second / "file", "r+", encoding="utf-8") as writer:
                fcntl.flock(writer, fcntl.LOCK_EX)
                writer.write("other")
            fcntl.flock(reader, fcntl.LOCK_SH)
            fcntl.flock(reader, fcntl.LOCK_UN)
            self.assertEqual(os.pread(reader, 100, 0), b"other")
            # A lock that is lost must show, so each read under a lock is the server's.
            fcntl.flock(reader, fcntl.LOCK_SH)
            again = os.open(at.path / "file", os.O_RDONLY)
            with open(at.directory / "file", "r+", encoding="utf-8") as writer:
                writer.write("third")
            self.assertEqual(os.pread(again, 100, 0), b"third")
            os.close(again)
            os.close(reader)

    def test_a_file_that_is_opened_with_o_direct_is_read_from_the_server(self):
        with place.mounted(options=("--cache", "60")) as at:
            (at.directory / "file").write_text("first")
            reader = os.open(at.path / "file", os.O_RDONLY | os.O_DIRECT)
            with open(at.directory / "file", "r+", encoding="utf-8") as writer:
                writer.write("other")
            with mmap.mmap(-1, mmap.PAGESIZE) as into:
                self.assertEqual(os.preadv(reader, [into], 0), len("other"))
                self.assertEqual(into[:5], b"other")
            os.close(reader)

    def test_a_new_directory_gets_names_from_others(self):
        with place.mounted() as at:
            (at.path / "new").mkdir()
            (at.directory / "new/theirs").write_text("theirs")
            with self.assertRaises(FileExistsError):
                os.open(at.path / "new/theirs", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            (at.path / "newer").mkdir()
            (at.directory / "newer/theirs").write_text("theirs")
            with open(at.path / "newer/theirs", "a+", encoding="utf-8") as file:
                file.seek(0)
                self.assertEqual(file.read(), "theirs")
            (at.path / "newest").mkdir()
            (at.directory / "newest/theirs").write_text("theirs")
            place.wait_until("the name", lambda: (at.path / "newest/theirs").exists(), 3)
            (at.path / "newest/ours").write_text("ours")
            os.rename(at.path / "newest/ours", at.path / "newest/renamed")
            self.assertEqual((at.path / "newest/renamed").read_text(), "ours")
            self.assertFalse((at.path / "newest/ours").exists())

    def test_a_new_directory_gets_names_from_others_within_a_second_with_any_cache(self):
        with place.mounted(options=("--cache", "60")) as at:
            (at.path / "new").mkdir()
            (at.directory / "new/theirs").write_text("theirs")
            place.wait_until("the name", lambda: (at.path / "new/theirs").exists(), 3)

    def test_without_a_cache_a_new_directory_shows_others_names_at_once(self):
        with place.mounted(options=("--cache", "0")) as at:
            (at.path / "new").mkdir()
            (at.directory / "new/theirs").write_text("theirs")
            self.assertEqual((at.path / "new/theirs").read_text(), "theirs")

    def test_a_read_only_mount_changes_nothing(self):
        with place.mounted(options=("--read-only",)) as at, self.assertRaises(OSError) as failure:
            (at.path / "file").write_text("a")
        self.assertEqual(failure.exception.errno, errno.EROFS)


class CommandLine(unittest.TestCase):
    def refused(self, *arguments):
        done = subprocess.run([place.TERRACE, "mount", *arguments], capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stderr

    def test_a_source_without_a_directory_is_a_usage_error(self):
        status, said = self.refused("nowhere", "/mnt")
        self.assertEqual(status, 2)
        self.assertIn("HOST:/DIR", said)

    def test_no_export_is_one_line(self):
        status, said = self.refused("127.0.0.1:/", str(pathlib.Path("/")), "--port", "1", "--timeout", "1")
        self.assertEqual(status, 1)
        self.assertEqual(len(said.strip().splitlines()), 1, said)


@contextlib.contextmanager
def below(at):
    """A mount point at which another file system is mounted already."""
    path = at.path.parent / "below"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "terrace-test", path], check=True)
    try:
        (path / "below").touch()
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=False)


def again(at, path):
    """A second mount of an export."""
    return place.Mount([place.TERRACE, "mount", at.mount.command[2], path, "--addr", next(place.ADDRESSES)], path)


@contextlib.contextmanager
def mounted_again(at):
    """A second mount of an export, at a place of its own."""
    path = at.path.parent / "second"
    path.mkdir()
    mount = again(at, path)
    mount.start()
    try:
        yield path
    finally:
        mount.stop()
        if place.is_mounted(path):
            subprocess.run(["umount", "--lazy", path], check=False)


def works(path):
    """Whether the mount answers."""
    try:
        os.listdir(path)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    unittest.main()
