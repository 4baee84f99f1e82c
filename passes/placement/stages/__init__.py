"""Pipeline stages: ideals, dynamic programs, local search."""
