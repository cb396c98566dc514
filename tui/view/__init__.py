"""The contents of the screens: tables, charts and sentences as lines of cells.

These modules don't use Textual, so commands print the same lines.
"""
