"""Train a PyTorch model whose state doesn't fit each device: state by memory, rows by speed; see
`Split.shard`.
"""
