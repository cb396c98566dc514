"""The Keras models that ship with evener."""
