"""Runs on disk: journals, locks, the list of runs, and replays."""
