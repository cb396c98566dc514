"""Turns records into rows, cells and lines: everything that a screen shows, computed without a
screen.

Read `cells` first (lines of the terminal and their spans), then `table` (columns that grow with the
terminal), then `devices`, `monitor` and `balance_lines`, which use both.
"""
