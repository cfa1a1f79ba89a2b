"""Benchmarks, started from the repository's root: `python -m benchmarks.NAME`."""
