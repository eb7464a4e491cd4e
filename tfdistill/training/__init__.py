"""A step and a fit that do not depend on who shares the work."""
