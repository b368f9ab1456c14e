"""Time to compile a language model of 4 and of 48 blocks; 3 min on 2 cores.

Expect: 48 blocks take less than twice as long as 4, being one scan
(`hpcjax table lm/compile-time`).
"""

from experiments.lm.compile_time import Config

base = Config()
smoke = {
    "model.width": "8",
    "model.heads": "2",
    "context": "4",
    "vocabulary": "11",
    "depths": "[1,2]",
    "repetitions": "1",
}
