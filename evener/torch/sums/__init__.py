"""All-reduces of the ranks' gradients with a weight for each rank, and other collectives."""
