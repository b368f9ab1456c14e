"""Sparse all-reduces of all members at once, in numpy alone, entry by entry."""

import numpy as np


def top(vector, k):
    """Indices of the k largest magnitudes, lower indices first among equals."""
    order = np.lexsort((np.arange(len(vector)), -np.abs(vector.astype(np.float64))))
    return np.sort([i for i in order[:k] if vector[i] != 0]).astype(int)


def ok_topk(accs, k):
    """Returns the sum and the residuals of Ok-Topk with exact selections."""
    total, sent = np.zeros(accs.shape[1], np.float32), []
    for acc in accs:
        own = top(acc, k)
        sent.append(own)
        total[own] += acc[own]
    kept = top(total, k)
    made, rest = np.zeros_like(total), accs.copy()
    made[kept] = total[kept]
    for acc, own in zip(rest, sent, strict=True):
        acc[np.intersect1d(own, kept)] = 0
    return made, rest


class OkTopk:
    """Ok-Topk with thresholds that are used again, rule by rule of the paper's code.

    No regions: which member adds up an entry does not change the sum.
    """

    def __init__(self, members, n, k, tau_prime, local, joint, limit):
        """`local` and `joint` are (low, high, down, up), `limit` (least, most)."""
        self.k, self.tau_prime, self.limit = k, tau_prime, limit
        self.local_rule, self.joint_rule = local, joint
        self.thresholds = np.zeros(members, np.float32)
        self.joint = np.float32(0)
        self.rest = np.zeros((members, n), np.float32)
        self.step = 0

    def average(self, gradients):
        """Returns the mean of the next step."""
        due = self.step % self.tau_prime == 0
        total, sent = np.zeros(self.rest.shape[1], np.float32), []
        for member, gradient in enumerate(gradients):
            acc = self.rest[member] = self.rest[member] + gradient
            own = self._select(member, acc, due)
            sent.append(own)
            total[own] += acc[own]
        kept = self._select_jointly(total, due)
        for acc, own in zip(self.rest, sent, strict=True):
            acc[np.intersect1d(own, kept)] = 0
        self.step += 1
        mean = np.zeros_like(total)
        mean[kept] = total[kept] / np.float32(len(gradients))
        return mean

    def _select(self, member, acc, due):
        threshold = self.thresholds[member]
        if due or not 0 < threshold < np.inf:
            own = top(acc, self.k)
            self.thresholds[member] = np.sort(np.abs(acc))[-self.k]
            return own
        for _ in range(5):
            if np.sum(np.abs(acc) >= threshold) <= 4 / 3 * self.k:
                break
            threshold = threshold * np.float32(1.03)
        own = np.flatnonzero(np.abs(acc) >= threshold)
        if not self.limit[0] <= len(own) <= self.limit[1]:
            return self._select(member, acc, True)
        self.thresholds[member] = self._corrected(threshold, own, self.local_rule)
        return own

    def _select_jointly(self, total, due):
        if due or not 0 < self.joint < np.inf:
            self.joint = np.sort(np.abs(total))[-self.k]
            return top(total, self.k)
        kept = np.flatnonzero(np.abs(total) >= self.joint)
        if not self.limit[0] <= len(kept) <= self.limit[1]:
            return self._select_jointly(total, True)
        self.joint = self._corrected(self.joint, kept, self.joint_rule)
        return kept

    def _corrected(self, threshold, chosen, rule):
        low, high, down, up = rule
        if len(chosen) < low * self.k:
            return threshold / np.float32(down)
        return threshold * np.float32(up) if len(chosen) > high * self.k else threshold
