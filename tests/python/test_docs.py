"""The examples of docs/python.md run."""

import builtins
import functools
import pathlib
import re
import unittest
from unittest import mock

import terrace
import terrace.aio
from optional import fsspec
from server import ExportServer, Server

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/python.md"


def connect_export(real, own_port, server, **options):
    """Connects to the test's port, whichever the example names."""
    return real(server, **{**options, "port": own_port})


class Docs(unittest.TestCase):
    def test_examples(self):
        examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        self.assertGreaterEqual(len(examples), 4)
        # Later examples use the imports of earlier ones. The page's server is 64 MiB of file and 16 MiB of memory at the first
        # instance index.
        with Server(64, 16) as server, ExportServer() as exporter, mock.patch.multiple(
            terrace,
            connect=functools.partial(terrace.connect, instance=server.instance),
            connect_export=functools.partial(connect_export, terrace.connect_export, exporter.port),
        ), mock.patch.multiple(terrace.aio, connect=functools.partial(terrace.aio.connect, instance=server.instance)):
            names = {}
            for number, example in enumerate(examples):
                # The second of these uses the files of the first.
                if fsspec is None and ("fsspec" in example or "connect_export" in example):
                    continue
                with self.subTest(example=number):
                    exec(compile(example, f"{PAGE}, example {number}", "exec"), names)

    def test_exceptions_and_their_bases(self):
        rows = re.findall(r"^\| `(\w+)` \(`(\w+)`\) \|", PAGE.read_text(), re.MULTILINE)
        self.assertEqual({name for name, _ in rows}, {name for name in terrace.__all__ if name.endswith("Error")} - {"TerraceError"})
        for name, base in rows:
            for parent in (terrace.TerraceError, getattr(builtins, base)):
                self.assertTrue(issubclass(getattr(terrace, name), parent), name)


if __name__ == "__main__":
    unittest.main()
