"""Hooks that `evener run` installs in a program's processes.

With these hooks the program trains by shares without being changed.
"""
