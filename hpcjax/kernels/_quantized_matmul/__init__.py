"""Products with matrices of 2, 3, 4 or 8 bits a weight."""
