"""What a run of a recipe consists of: checked, immutable, exact in JSON."""
