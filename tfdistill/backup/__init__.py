"""A training that was stopped resumes as if it had not been."""
