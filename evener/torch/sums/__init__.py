"""All-reduces of gradients with a weight for each rank, and other collectives."""
