"""Neighbours of 128 targets from a store or from a snapshot, by policy; a minute.

An R-MAT graph of 2^19 vertices and 8 million edges.
Expect: a third of the pages with a full refresh every 50 batches, about all with a
partial refresh in every batch (`hpcjax table graphsnapshot/loader`).
"""

from experiments.graphsnapshot.loader import Config

base = Config()
