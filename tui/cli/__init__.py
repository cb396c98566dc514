"""The commands of `evener`, one module per group of commands."""
