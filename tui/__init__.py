"""Commands and the full-screen app: everything a person sees. Measures and decides nothing."""
