"""Training: buckets, optimizers, layers, precision, timelines."""
