"""The plan file: its format, its checks, and new shares when some of its devices are gone."""
