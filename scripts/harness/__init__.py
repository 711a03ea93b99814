"""What the demo, the conformance run and the benchmarks share: two programs on two ends of a NIC, and what they print."""
