"""The senses: what is in this machine and how it is doing."""
