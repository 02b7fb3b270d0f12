"""What is measured, each in a process of its own: `python -m tests.benchmarks.subjects NAME OPTIONS` (JSON).

A subject connects, says that it is ready, and then obeys one command a line on standard input (protocol.py). All of
them run on the same event loop and the same client libraries.
"""
