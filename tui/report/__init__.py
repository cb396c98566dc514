"""A run as one HTML page or picture."""
