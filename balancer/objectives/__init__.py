"""The objectives: what a search can be asked to have most of. Each has a file; `registry` lists them."""
