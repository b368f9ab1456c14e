"""Time to compile a language model of 4 and of 48 blocks; 3 min on 2 cores.

Expect: 48 blocks take less than twice as long as 4, being one scan
(`hpcjax table lm/compile-time`).
"""

from experiments.lm.compile_time import Config

base = Config()
