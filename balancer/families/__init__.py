"""The families: ways to use the devices, of which a search compares layouts. Each has a file; `registry` lists them."""
