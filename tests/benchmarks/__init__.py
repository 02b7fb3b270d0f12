"""Benchmarks: what `make bench` runs. docs/performance.md tells what is measured, how, and what came out."""
