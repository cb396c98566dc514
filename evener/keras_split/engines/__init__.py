"""How a split Keras step lies on devices: one device, towers, mirrored, or a process for each device."""
