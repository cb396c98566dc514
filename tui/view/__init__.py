"""Turns records into the rows, cells and lines that a screen shows, without needing a screen.

Read `cells` first, which has lines of the terminal and their spans. Then read `table`, which has
columns that grow with the terminal. `devices`, `monitor` and `balance_lines` use both.
"""
