"""Models that train one optimizer step at a time; independent of the balancer."""
