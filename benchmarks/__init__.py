"""Side-by-side measurements whose figures the documentation quotes."""
