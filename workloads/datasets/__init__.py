"""Data sets made in code: nothing is downloaded."""
