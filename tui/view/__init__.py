"""Records as rows, cells and lines: everything that the screen shows, computed without a screen.

Read `cells` (what a line is), then `table` (columns that grow with the terminal), then `devices`,
`monitor` and `balance`, which use both.
"""
