"""Audits: check during training that the loss gives the same gradient with unequal shares."""
