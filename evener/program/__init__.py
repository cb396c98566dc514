"""Hooks that `evener run` installs in a program's processes so that the program trains by
shares without being changed.
"""
