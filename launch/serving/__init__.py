"""Hands versions of a run over to TensorFlow Serving, with a model card."""
