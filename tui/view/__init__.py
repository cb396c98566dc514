"""Turns records into the rows, cells and lines that a screen shows, without needing a screen.

Read `cells` first (lines of the terminal and their spans), then `table` (columns that grow with the
terminal), then `devices`, `monitor` and `balance_lines`, which use both.
"""
