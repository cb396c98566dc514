"""The rows that a PyTorch process trains on: their order, the fetching of batches, and loaders."""
