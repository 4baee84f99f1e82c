"""Bundles on ranks of MPI: a process per device, on one host or several."""
