"""The machine around the devices: its CPUs, memory and processes."""
