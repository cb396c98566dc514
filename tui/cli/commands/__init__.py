"""One module a command: arguments to calls, events to lines."""
