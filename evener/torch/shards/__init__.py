"""Train a PyTorch model whose state doesn't fit each device; see `Split.shard`.

State is divided by memory, rows by speed.
"""
