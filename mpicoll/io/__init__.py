"""Data, batches and files: what is read, in which order, and how it is written whole."""
