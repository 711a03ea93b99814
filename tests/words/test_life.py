"""The functions that docs/life-of-a-request.md names exist."""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CRATES = ("transport", "nic", "shm", "memory", "fabric", "ibverbs")


def names_in(text):
    """The names in code spans before the section on removed functions: `Type::function`, `function`, `Type`."""
    described = text.split("## What went")[0]
    spans = re.findall(r"`([A-Za-z_:]+)`", described)
    return sorted({span.split("::")[-1] for span in spans})


class Life(unittest.TestCase):
    def test_names_exist(self):
        text = (ROOT / "docs/life-of-a-request.md").read_text()
        sources = (path for crate in CRATES for path in (ROOT / "crates" / crate / "src").rglob("*.rs"))
        code = "\n".join(path.read_text() for path in sources)
        for name in names_in(text):
            with self.subTest(name=name):
                self.assertRegex(code, rf"\b(fn|struct|enum|trait|const) {name}\b")

    def test_names_are_found(self):
        self.assertEqual(names_in("`Qp::a`, `b` and `ibv_c`\n## What went\n`d`"), ["a", "b", "ibv_c"])


if __name__ == "__main__":
    unittest.main()
