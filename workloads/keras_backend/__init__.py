"""Workloads for Keras on TensorFlow."""
