"""Benchmarks that take minutes and write the tables in docs/benchmarks.

Run one as `python -m benchmarks.NAME`.
"""
