"""Find and sample the devices of this machine, and assign them to child processes.

Start with `types` for the terms and `discover` for how requests are resolved. Then read the
sources, which sample the devices: `nvidia`, `cpu` and `simulated`.
"""
