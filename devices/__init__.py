"""Devices to train on: how they are requested, found and monitored.

`types` defines the data, and `discover` finds the devices of a request. The sources in `nvidia`,
`cpu`, `simulated` and `cluster` read the devices' metrics.
"""
