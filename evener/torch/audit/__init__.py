"""Audits: compute a few rows again, to check that unequal shares don't change the gradient."""
