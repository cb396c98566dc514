"""Serves evener over HTTP: metrics for Prometheus, and the app in a browser."""
