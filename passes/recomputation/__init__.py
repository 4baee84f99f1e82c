"""Recomputation: the order of nodes, clones of nodes, and the model with them."""
