"""One group inside its Slurm job; no TensorFlow."""
