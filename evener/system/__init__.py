"""Access to the operating system for this process: cores, memory, files, signals and threads."""
