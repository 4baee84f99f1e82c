"""Placements with a proof, by branch and bound."""
