"""Text for the terminal, JSON and HTML, such as summaries, tables and reports; option parsing."""
