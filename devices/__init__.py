"""The devices of this machine: found, sampled, and given to children.

Read `types` for the terms and `discover` for what a request means, then the sources: `nvidia`,
`cpu`, `simulated`.
"""
