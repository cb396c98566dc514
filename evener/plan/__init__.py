"""A plan: its file, its layout, its checks, and the plan for the devices that are left."""
