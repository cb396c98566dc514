"""The commands and the full-screen app: everything a person sees.

This package measures nothing and decides nothing.
"""
