"""One training step: passes, gradient weights, checks and recovery from out-of-memory errors."""
