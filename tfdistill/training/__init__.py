"""A step and a fit that do not depend on how the work is shared."""
