"""The search for the fastest layout: probes, decisions, the journal, and the resulting plan."""
