"""Attention in which the heads of a cluster share one map."""
