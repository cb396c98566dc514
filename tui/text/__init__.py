"""Text for the terminal, JSON and HTML, and the parsing of options."""
