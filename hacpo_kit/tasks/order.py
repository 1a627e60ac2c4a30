"""Reproducible random order: the same on every machine and with every release of numpy."""

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np


def bit_generator(*key: Any) -> np.random.PCG64:
    """Return a generator whose random words depend on the printed key only."""
    return np.random.PCG64(int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest(), "big"))


def shuffled_indices(n: int, *key: Any) -> np.ndarray:
    """Return the numbers 0 … n-1 in an order that depends on the key only."""
    # numpy guarantees that the words of PCG64 stay the same between releases, but not permutation()
    return np.argsort(bit_generator(*key).random_raw(n), kind="stable")


@lru_cache(maxsize=8)
def epoch_order(n: int, seed: int, epoch: int, size: int, phase: int) -> np.ndarray:
    """Return the order of n problems in an epoch of a stream that is read in batches of `size`.

    Batches start at positions phase, phase + size, …. A batch across the border of two epochs takes the end of one and the
    start of the next; problems that it already holds are moved behind its end, so that no batch repeats a problem.
    """
    first = epoch
    while first > 0 and (first * n - phase) % size:
        first -= (
            1  # the start of an epoch depends on the end of the previous one, back to a border that no batch crosses
        )
    order = shuffled_indices(n, "batch", seed, first)
    for later in range(first + 1, epoch + 1):
        held = (later * n - phase) % size  # problems of the batch across the border that come from the epoch before
        fresh = shuffled_indices(n, "batch", seed, later)
        head = fresh[~np.isin(fresh, order[n - held :])][: size - held]
        order = np.concatenate([head, fresh[~np.isin(fresh, head)]])
    return order
