"""Hooks that `evener run` installs in a program's processes.

With these hooks, an unchanged PyTorch program trains by shares: each rank gets the number of rows
per batch that the plan assigns to its device.
"""
