"""The full-screen app and what runs behind it."""
