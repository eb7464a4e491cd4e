"""Groups of tasks as processes of this machine; no TensorFlow."""
