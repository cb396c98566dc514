"""The operating system's limits and files for this process: cores, memory, folders."""
