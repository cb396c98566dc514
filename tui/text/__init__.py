"""Text for terminals: figures, tables and progress lines. Knows no screen."""
