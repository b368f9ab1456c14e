"""The k-th largest magnitude, and the numbers that reach it."""
