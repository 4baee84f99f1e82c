"""Search over placements: coarsening, annealing, a portfolio of placers."""
