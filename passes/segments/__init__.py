"""Segments: memory limits, boundary types, manifest."""
