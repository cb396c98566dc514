"""What the operating system leaves and gives to this process: cores, memory, files."""
