"""The face: commands and the full-screen app, everything a person sees. Decides nothing."""
