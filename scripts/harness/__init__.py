"""Shared by the demo, the conformance run and the benchmarks: runs two programs on two ends of a NIC, and parses their
output."""
