"""Shared by the demo, the conformance run and the benchmarks: runs two programs on two NICs, and parses their
output."""
