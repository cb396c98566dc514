"""The command line: options, streams, sessions, and the code of each command."""
