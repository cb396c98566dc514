"""The brain: search, session, journal and probes. Knows no screen."""
