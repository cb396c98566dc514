"""Models that train one optimizer step at a time. Independent of the balancer."""
