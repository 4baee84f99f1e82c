"""The model that computes the choice, and what passes take of it."""
