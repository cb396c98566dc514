"""Live reports of training processes: writing and reading them."""
