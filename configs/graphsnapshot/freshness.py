"""Deleted edges that stay in a snapshot, by refreshes since; 20 s.

Expect: after k refreshes of a row (1 − ρ)^k of them, none after a full one (`hpcjax
table graphsnapshot/freshness`).
"""

from experiments.graphsnapshot.freshness import Config

base = Config()
