"""Textual widgets that draw the lines of `evener.tui.view`."""
