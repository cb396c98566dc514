"""HTTP servers: the app in a browser, and metrics for Prometheus."""
