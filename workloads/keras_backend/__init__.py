"""Keras workloads on TensorFlow."""
