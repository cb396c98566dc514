"""Widgets: lines of text, lists, choices, bars and charts."""
