"""The plan file: its format, its checks, and changes of its shares."""
