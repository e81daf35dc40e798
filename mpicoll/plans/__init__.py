"""Algorithms as data, verified and drawn: no MPI, no arrays."""
