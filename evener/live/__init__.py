"""Reports of a training's speed: the reporter, its files, and the journal of a training."""
