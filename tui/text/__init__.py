"""Text for the terminal, JSON and HTML: summaries, tables, reports and parsing of options."""
