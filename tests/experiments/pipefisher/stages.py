"""What processes of `test_two_processes` do."""

import os
import signal
import threading

from experiments.pipefisher import stage, two_processes


def run_once(transport, cfg, seconds, mode):
    """Runs with a schedule for given times, and returns what is left behind too."""
    own = stage.Stage(cfg, transport.rank)
    filled = two_processes.plan(cfg, [seconds, seconds])
    return {**stage.run(transport, own, filled, mode), "arrays": own.arrays()}


def lose_a_task(transport, cfg, seconds, mode):
    """Process 1 forgets that it has done a task."""
    own = stage.Stage(cfg, transport.rank)
    filled = two_processes.plan(cfg, [seconds, seconds])
    check = stage.perf.check_work

    def checked(ran, rows, steps):
        if transport.rank == 1:
            last = max(
                n for n, each in enumerate(ran) if isinstance(each.work, stage.Task)
            )
            del ran[last]
        check(ran, rows, steps)

    stage.perf.check_work = checked
    return stage.run(transport, own, filled, mode)


def stop_in_a_step(transport, cfg, seconds, number):
    """Process 1 gets a signal in its first seconds."""
    if transport.rank == 1:
        me = os.getpid(), signal.Signals(number)
        threading.Timer(3.0, os.kill, me).start()
    return run_once(transport, cfg, seconds, "filled")
