"""The result of a search: the plan, its evidence, and the sentences that explain it."""
