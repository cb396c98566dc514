"""What the screens show: tables, charts and sentences, as lines of terminal cells.

These modules don't use Textual, so that commands can print the same lines.
"""
