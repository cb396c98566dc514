"""Finds and samples the devices of this machine, and assigns them to child processes.

`types` defines the terms, and `discover` shows how a request is resolved. The sources in `nvidia`,
`cpu` and `simulated` sample the devices.
"""
