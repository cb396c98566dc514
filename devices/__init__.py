"""The devices of this machine: finding them, sampling them and assigning them to children.

Start with `types` for the terms and `discover` for how requests are resolved, then read the
sources: `nvidia`, `cpu` and `simulated`.
"""
