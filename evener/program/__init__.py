"""Hooks that `evener run` installs in a program's processes.

With these hooks, the unchanged program trains by shares.
"""
