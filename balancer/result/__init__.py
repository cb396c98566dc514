"""The result of a search: the plan, its evidence, and the text that explains it."""
