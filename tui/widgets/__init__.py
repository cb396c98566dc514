"""Textual widgets that draw the lines made by `evener.tui.view`."""
