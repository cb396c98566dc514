"""The models that a search can train: built-in ones for each framework, and the user's own."""
