"""Recipes: whole post-training runs as short, readable loops over trainsession's public names."""
