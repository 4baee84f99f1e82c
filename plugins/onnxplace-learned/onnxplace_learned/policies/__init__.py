"""Policies of placers that learn: networks, their episodes in simulated time, and their gradients."""
