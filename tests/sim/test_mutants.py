"""The table of mutations matches the source. `mutants.py` is run by hand, so only this test detects a changed text."""

import unittest

import mutants


class Table(unittest.TestCase):
    maxDiff = None

    def test_each_text_occurs_exactly_once(self):
        mismatches = []
        for name, path, text, _ in mutants.MUTANTS:
            count = (mutants.ROOT / path).read_text().count(text)
            if count != 1:
                mismatches.append(f"{name}: occurs {count} times in {path}")
        self.assertEqual(mismatches, [], "fix the table in tests/sim/mutants.py")

    def test_each_replacement_differs(self):
        self.assertEqual([name for name, _, text, replacement in mutants.MUTANTS if text == replacement], [])

    def test_names_are_unique(self):
        names = [name for name, *_ in mutants.MUTANTS]
        self.assertEqual(len(names), len(set(names)))


if __name__ == "__main__":
    unittest.main()
