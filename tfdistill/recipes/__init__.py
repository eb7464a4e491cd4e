"""Recipes: what a run trains, and what one task of it does and writes."""
