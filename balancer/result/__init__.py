"""What a search ends with: the plan, its evidence, and the sentences that explain it."""
