"""The search, its sessions, journals and probes. It has no user interface."""
