"""The engines of a split Keras step: one device, towers, mirrored, or a process for each device."""
