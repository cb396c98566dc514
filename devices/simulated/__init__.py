"""Devices whose speed and memory are written down in a file instead of measured."""
