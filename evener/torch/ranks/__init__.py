"""The ranks of a training: their devices, their step times, and how they learn of a rank's end."""
