"""The field's words: docs/words.txt lists those that the repository no longer uses."""

import pathlib
import re
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = ROOT / "docs/words.txt"
# Foreign files, versions of crates, the list itself, and the document that lists removed functions.
OTHERS = (
    "fuzz/corpus/",
    "tests/corpus/",
    "crates/ibverbs/src/abi/bindings.rs",
    "docs/words.txt",
    "docs/life-of-a-request.md",
)
LOCKS = "Cargo.lock"


def words():
    lines = (line.split("#")[0].strip() for line in WORDS.read_text().splitlines())
    return [line for line in lines if line]


def uses_in(text, pattern):
    return [(text.count("\n", 0, match.start()) + 1, match.group()) for match in pattern.finditer(text)]


def pattern_of(listed):
    phrases = sorted((r"\s+".join(map(re.escape, phrase.split())) for phrase in listed), key=len, reverse=True)
    return re.compile(rf"\b(?:{'|'.join(phrases)})\b", re.IGNORECASE)


class Words(unittest.TestCase):
    maxDiff = None

    def test_words_that_are_gone_stay_away(self):
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
        files = [name for name in names if not name.startswith(OTHERS) and not name.endswith(LOCKS)]
        self.assertGreater(len(files), 500, "git names the repository's files")
        pattern, found = pattern_of(words()), []
        for name in files:
            try:
                text = (ROOT / name).read_text()
            except UnicodeDecodeError:
                continue
            found += [f"{name}:{line}: {use!r}" for line, use in uses_in(text, pattern)]
        self.assertEqual(found, [], "docs/words.txt has these words; STYLE's table has the field's")

    def test_a_use_is_found_whatever_its_case_and_line(self):
        pattern = pattern_of(["old word", "gone"])
        self.assertEqual(uses_in("an\nGone, and an old\n  word; goner", pattern), [(2, "Gone"), (2, "old\n  word")])


if __name__ == "__main__":
    unittest.main()
