"""One optimizer step of a rank: its passes, their weights, and recovery after out-of-memory."""
