"""Data generator, training and evaluation of the small demonstration model."""
