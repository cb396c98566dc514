"""Train a PyTorch model whose state doesn't fit on one device; see `Split.shard`.

Each device holds a part of the state in proportion to its memory, and computes rows in proportion
to its speed.
"""
