"""Turns records into the rows, cells and lines that a screen shows, without needing a screen.

Read `cells` first, which defines lines and the spans that they consist of. Then read `table`, whose
columns grow with the terminal. `devices`, `monitor` and `balance_lines` use both.
"""
