"""IO traces: the reads and writes of a program and its children by file, offset and length, from strace's output."""

import re
import subprocess

from translation import Access

CALLS = "open,openat,creat,read,write,readv,writev,pread64,pwrite64,preadv,pwritev,lseek,rename,renameat,renameat2"
LINE = re.compile(r"^(\d+) +(.*)$")
FD = re.compile(r"^\w+\((\d+)<([^>]*)>")
RESULT = re.compile(r"= (-?\d+)(?:<([^>]*)>)?(?: \(deleted\))?(?: E\w+.*)?$")
STRINGS = re.compile(r'"((?:[^"\\]|\\.)*)"')
RESUMED = re.compile(r"^<\.\.\. \w+ resumed>,? ?")
UNFINISHED = " <unfinished ...>"


def record(command, output, **options):
    """Runs a command under strace, whose output goes to a file."""
    return subprocess.Popen(["strace", "--follow-forks", "--decode-fds=path", "--string-limit=0", "--quiet=all", "--signal=none",
                             f"--trace={CALLS}", f"--output={output}", *command], **options)


def read(lines, directory):
    """Reads strace's lines. Returns the accesses to files below a directory, and the last path of each file."""
    reader = Reader(str(directory))
    for line in joined(lines):
        reader.take(line)
    return reader.accesses, {number: path for path, number in reader.numbers.items()}


def joined(lines):
    """Joins the two halves of calls that other threads' calls interrupt."""
    halves = {}
    for line in lines:
        match = LINE.match(line.rstrip("\n"))
        if not match:
            continue
        thread, call = match.groups()
        if call.endswith(UNFINISHED):
            halves[thread] = call[: -len(UNFINISHED)]
        elif RESUMED.match(call):
            yield halves.pop(thread, "") + RESUMED.sub("", call, count=1)
        else:
            yield call


class Reader:
    def __init__(self, directory):
        self.directory = directory.rstrip("/") + "/"
        self.numbers, self.accesses = {}, []
        self.count = 0
        # Of open files: the position of each descriptor, which of them append, and the length of each file.
        self.positions, self.appends, self.lengths = {}, set(), {}

    def take(self, call):
        result = RESULT.search(call)
        if not result or int(result[1]) < 0:
            return
        name = call.partition("(")[0]
        if name in ("open", "openat", "creat"):
            self.open(call, int(result[1]), result[2])
        elif name.startswith("rename"):
            self.rename(call)
        else:
            self.move(name, call, int(result[1]))

    def open(self, call, descriptor, path):
        if not path or not path.startswith(self.directory):
            return
        key = (descriptor, path)
        self.positions[key] = 0
        (self.appends.add if "O_APPEND" in call else self.appends.discard)(key)
        if "O_TRUNC" in call or call.startswith("creat"):
            self.lengths[self.number(path)] = 0

    def rename(self, call):
        strings = STRINGS.findall(call)
        directories = re.findall(r"AT_FDCWD<([^>]*)>", call)
        if len(strings) != 2:
            return
        old, new = (name if name.startswith("/") else f"{directories[0] if directories else self.directory}/{name}".replace("//", "/") for name in strings)
        if old in self.numbers:
            self.numbers[new] = self.numbers.pop(old)

    def move(self, name, call, result):
        match = FD.match(call)
        if not match or not match[2].startswith(self.directory):
            return
        key = (int(match[1]), match[2])
        number = self.number(match[2])
        if name == "lseek":
            self.positions[key] = result
        elif name in ("pread64", "pwrite64", "preadv", "pwritev"):
            offset = int(call[: call.rindex(")")].rpartition(",")[2])
            self.add(number, offset, result)
        else:
            is_append = key in self.appends and name.startswith("write")
            offset = self.lengths.get(number, 0) if is_append else self.positions.get(key, 0)
            self.positions[key] = offset + result
            self.add(number, offset, result)

    def add(self, number, offset, length):
        self.lengths[number] = max(self.lengths.get(number, 0), offset + length)
        if length > 0:
            self.accesses.append(Access(number, offset, length))

    def number(self, path):
        if path not in self.numbers:
            self.numbers[path] = self.count
            self.count += 1
        return self.numbers[path]
