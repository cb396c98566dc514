"""Start the processes of a training run, and restart them after failures."""
