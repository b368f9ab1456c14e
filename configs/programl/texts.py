"""Words of POJ-104's files that the files of other tasks know; half a minute.

Expect: all of them, 46 with the unknown one, as all pointers are `ptr` (`hpcjax table
programl/dataflow`).
"""

from experiments.programl.texts import Config

base = Config()
