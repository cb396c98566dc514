"""All-reduce of weighted gradients, and other collectives."""
