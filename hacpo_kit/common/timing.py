"""Wall time of the parts of a step."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of a block to seconds[name]."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def divide_time(total: float, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Divide a total wall time in proportion to the agents' own times, since agents in workers run at once.

    >>> divide_time(6.0, [{"rollout": 4.0, "scoring": 2.0}, {"rollout": 4.0, "scoring": 2.0}])
    {'rollout': 4.0, 'scoring': 2.0}
    """
    sums: Counter[str] = Counter()
    for part in parts:
        sums.update(part)
    return {name: total * seconds / sum(sums.values()) for name, seconds in sums.items()}
