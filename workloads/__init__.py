"""Models that train one optimizer step at a time; they don't depend on the balancer."""
