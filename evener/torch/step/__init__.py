"""One optimizer step of a rank: its passes, their weights, and passes that run out of memory."""
