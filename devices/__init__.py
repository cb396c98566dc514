"""Devices to train on: requests for them, their discovery, and their readings.

`types` defines the data, and `discover` resolves a request. The sources in `nvidia`, `cpu`,
`simulated` and `cluster` read the devices.
"""
