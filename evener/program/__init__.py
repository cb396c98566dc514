"""Hooks that `evener run` puts into the processes of a program, by which that trains in shares as
it is.
"""
