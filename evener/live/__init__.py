"""Reports of a training run's speed: the reporter, its files and the training journal."""
