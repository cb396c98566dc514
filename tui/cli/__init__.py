"""The command line: the options, the output streams, and the code of each command."""
