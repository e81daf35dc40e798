"""Buffers of any kind as bytes, and operators on them."""
