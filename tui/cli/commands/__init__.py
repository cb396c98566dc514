"""The code of each command, imported when it runs."""
