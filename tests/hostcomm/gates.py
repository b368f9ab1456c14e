"""Who is in time in which round, held by barriers between threads."""

import threading


class Gates:
    """Lets rounds begin only once all that are to be in time have written their models.

    A rank that is late in a round posts only after its agent has ended the round, and
    has written its model of the step before when the round begins.
    """

    def __init__(self, ranks, late=()):
        self.late = frozenset(late)  # of (round, rank)
        self._ranks, self._barriers = ranks, {}
        self._lock = threading.Lock()

    def _barrier(self, number):
        with self._lock:
            # Who is late in the first round has written nothing before.
            late = sum(step == number == 0 for step, _ in self.late)
            made = threading.Barrier(self._ranks - late)
            return self._barriers.setdefault(number, made)

    def hold(self, groups, steps):
        """After `groups.start`: its arrivals wait for the others' models."""
        rounds, rank = groups._rounds, groups.transport.rank
        arrive, post = rounds.arrive, groups.post

        def together():
            number = rounds.arrived + 1
            if number < steps and (number, rank) not in self.late:
                self._barrier(number).wait(20.0)
            arrive()

        def after(step, model):
            if (step, rank) in self.late:
                rounds.wait(step, 20.0)
            post(step, model)
            if (step + 1, rank) in self.late and step + 1 < steps:
                self._barrier(step + 1).wait(20.0)

        rounds.arrive, groups.post = together, after
