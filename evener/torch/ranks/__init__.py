"""The ranks of a training: where each one is, what it measures, and how it learns that another has
ended.
"""
