"""What a training process does in every step, independent of the framework."""
