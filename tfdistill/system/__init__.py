"""What Python, Keras and the machine give, made safe to rely on."""

# Modules on which contrib, and what others write, may stand.
__all__ = ["processes", "run_files", "untrusted"]
