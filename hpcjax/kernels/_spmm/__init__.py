"""Products of a sparse matrix with a dense one."""
