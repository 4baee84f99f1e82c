"""Weights that stream: which stay on their devices, where their nodes run, and how they come in time."""
