"""Widgets of the app: lines of text, lists, choices, and charts."""
