"""Training independent of the framework: shares, passes, audits and bottlenecks."""
