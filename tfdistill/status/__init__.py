"""A run as its files show it: events, record, metrics; no TensorFlow."""
