"""A small server of teachers, for machines without TensorFlow Serving."""
