"""The folder that parent.py puts at the head of a parent's PYTHONPATH."""
