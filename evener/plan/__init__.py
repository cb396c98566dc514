"""The plan file: its format, its checks, and new shares for the devices that remain."""
