"""Models that train, one optimizer step at a time. Knows no balancer."""
