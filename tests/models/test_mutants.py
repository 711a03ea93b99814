"""The table of planted faults fits the source. `mutants.py` is run by hand, so only this test notices a text that has changed."""

import unittest

import mutants

TABLE = [row for rows in mutants.MUTANTS.values() for row in rows]


class Table(unittest.TestCase):
    maxDiff = None

    def test_each_text_occurs_exactly_once(self):
        misfits = []
        for name, path, text, _ in TABLE:
            count = (mutants.ROOT / path).read_text().count(text)
            if count != 1:
                misfits.append(f"{name}: occurs {count} times in {path}")
        self.assertEqual(misfits, [], "mend the table in tests/models/mutants.py")

    def test_each_replacement_differs(self):
        self.assertEqual([name for name, _, text, replacement in TABLE if text == replacement], [])

    def test_names_are_unique(self):
        names = [name for name, *_ in TABLE]
        self.assertEqual(len(names), len(set(names)))


if __name__ == "__main__":
    unittest.main()
