"""Text for terminals: numbers, tables and progress lines. Imports no screen."""
