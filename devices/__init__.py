"""What is in this machine and how it is doing.

Read `types` for the terms and `discover` for what a request means, then the sources: `nvidia`, `cpu`, `simulated`.
"""
