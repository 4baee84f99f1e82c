"""Micro-batches: a batch computed in parts one after the other, by the rules of sharding."""
