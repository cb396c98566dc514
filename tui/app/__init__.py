"""The full-screen app: screens wired to keys, themes, and its start on a terminal."""
