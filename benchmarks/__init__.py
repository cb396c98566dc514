"""Measurements that take minutes and make the tables in docs/benchmarks; run as `python -m
benchmarks.NAME`.
"""
