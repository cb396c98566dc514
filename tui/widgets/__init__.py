"""Parts of the full-screen app."""
