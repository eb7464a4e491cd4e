"""What one task of one group does when it runs a recipe."""
