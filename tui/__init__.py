"""The commands and the full-screen app: everything a person sees.

It measures and decides nothing.
"""
