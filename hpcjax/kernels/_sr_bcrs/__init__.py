"""Sparse matrices of column vectors, with integers of few bits."""
