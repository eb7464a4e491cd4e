"""The experiment: methods, their runs, and what the runs show."""
