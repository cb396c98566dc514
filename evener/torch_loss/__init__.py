"""What a PyTorch training's loss is a mean over, found by computing it for a few rows before the first step."""
