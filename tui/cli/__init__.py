"""The command line: options, output and one module a command."""
