"""The check of a PyTorch training's loss: what it is a mean over, by computing a few rows before
the first step.
"""
