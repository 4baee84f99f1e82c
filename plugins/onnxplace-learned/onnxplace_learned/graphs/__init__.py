"""Families of neural networks as cost graphs, and sets of graphs for training and tests."""
