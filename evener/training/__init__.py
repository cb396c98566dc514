"""The parts of training that are the same for all frameworks: shares, passes and audits."""
