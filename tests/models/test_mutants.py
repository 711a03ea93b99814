"""The table of planted faults fits the source: see `planting.TableTest`."""

import unittest

import mutants


class Table(mutants.planting.TableTest, unittest.TestCase):
    FAULTS = mutants.FAULTS


if __name__ == "__main__":
    unittest.main()
