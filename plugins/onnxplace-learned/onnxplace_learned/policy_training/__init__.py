"""Training of placers that learn: graphs, the loop over updates, checkpoints, learning curves, and a study."""
