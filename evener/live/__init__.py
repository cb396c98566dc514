"""Live reports of training processes: how they are written and read."""
