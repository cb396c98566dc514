"""Training of unchanged programs: hooks in PyTorch and its libraries that let shares differ."""
