"""The arithmetic of shares: rows of a batch, passes, curves, and the shares that train fastest.
Pure.
"""
