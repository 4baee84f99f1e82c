"""Costs in files: the results of `profile` as JSON or CSV."""
