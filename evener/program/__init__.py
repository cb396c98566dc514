"""Hooks with which `evener run` makes an unchanged PyTorch program train by shares.

Each rank then gets the number of rows per batch that the plan assigns to its device.
"""
