"""The operations of an encoder layer between its contractions, each in one pass."""
