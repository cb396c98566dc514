"""This process's access to the system: CPU cores, memory, files, signals and threads."""
