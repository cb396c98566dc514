"""Text for terminals: numbers, tables and progress lines. It imports no screen."""
