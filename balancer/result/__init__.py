"""Turn what a search measured into a verdict, a plan, and the sentences that users read."""
