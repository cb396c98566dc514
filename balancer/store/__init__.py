"""Files of past runs, measured links, and locks."""
