"""Records to rows, cells and lines: everything the screen shows, worked out without a screen.

Read `cells` (what a line is), then `table` (columns that grow with the terminal), then `devices`,
`monitor` and `balance`, which are those two applied.
"""
