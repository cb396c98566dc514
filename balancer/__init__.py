"""The search, its sessions, journals and probes. Has no user interface."""
