"""Problems: prompts with their reference answers, and the order in which a run uses them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hacpo_kit.tasks.order import epoch_order, shuffled_indices

Message = Mapping[str, str]


@dataclass(frozen=True)
class Problem:
    """One prompt with its reference answer.

    `prompt` is text or a tuple of chat messages {"role", "content"}. gold="" means that the answer is unknown. `meta` holds
    further columns and takes no part in equality.

    Raises ValueError for an empty id or prompt, for values of other types, and for text that UTF-8 cannot encode.

    >>> Problem("sums/0", "37+58=", gold="95").gold
    '95'
    """

    id: str
    prompt: str | tuple[Message, ...] = field(hash=False)
    gold: str
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self):
        if not isinstance(self.id, str) or not self.id:
            raise ValueError(f"id must be text and not empty, not {self.id!r}")
        if not isinstance(self.gold, str):
            raise ValueError(f"gold must be text, not {self.gold!r}; load_problems converts numbers to text")
        object.__setattr__(self, "prompt", _checked_prompt(self.prompt))
        object.__setattr__(self, "meta", dict(self.meta))
        try:
            json.dumps([self.id, self.prompt, self.gold], ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"problem {self.id!r} cannot be stored as JSON in UTF-8: {error}") from None

    @property
    def prompt_text(self) -> str:
        """The prompt as one text, for tables: chat messages as JSON."""
        if isinstance(self.prompt, str):
            return self.prompt
        return json.dumps(self.prompt, ensure_ascii=False)


@dataclass(frozen=True, repr=False)
class Problems(Sequence):
    """An immutable sequence of Problem; `load_problems(**problems.source)` loads it again, unless `source` is None.

    Two are equal if they hold equal problems in the same order. Raises ValueError if two problems have the same id.

    >>> problems = Problems([Problem("a", "1+1=", "2"), Problem("b", "2+2=", "4")])
    >>> len(problems), problems[1].gold, problems.sample(2, seed=1) == problems.sample(2, seed=1)
    (2, '4', True)
    """

    problems: tuple[Problem, ...]
    name: str = field(default="problems", compare=False)
    source: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "problems", tuple(self.problems))
        if repeated := [repr(id) for id, count in Counter(p.id for p in self.problems).items() if count > 1]:
            raise ValueError(
                f"{self.name}: {len(repeated)} ids occur more than once: {_first(repeated)}; name a column of unique "
                "ids with id=, or remove the id column to number the rows"
            )

    def __len__(self) -> int:
        return len(self.problems)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.problems)

    def __getitem__(self, index):
        return Problems(self.problems[index], self.name) if isinstance(index, slice) else self.problems[index]

    def __repr__(self) -> str:
        return f"Problems({self.name!r}, {len(self)} problems)"

    @property
    def notes(self) -> tuple[str, ...]:
        """The number of problems without a reference answer, with the reasons for the first of them.

        >>> Problems([Problem("a", "1+1=", "2"), Problem("b", "2+2=", "")]).notes
        ("1 of 2 problems have no reference answer and get no reward: 'b' (gold is empty)",)
        """
        no_gold = [f"{p.id!r} ({p.meta.get('no_gold', 'gold is empty')})" for p in self if not p.gold]
        count = f"{len(no_gold)} of {len(self)} problems have no reference answer and get no reward"
        return (f"{count}: {_first(no_gold)}",) if no_gold else ()

    def sample(self, k: int, seed: int = 0) -> Problems:
        """Return k different problems in random order, the same ones for the same seed.

        Raises ValueError if there are fewer than k.
        """
        if not 0 <= k <= len(self):
            raise ValueError(f"cannot sample {k} problems from {self.name}, which has {len(self)}")
        return self._at(shuffled_indices(len(self), "sample", seed)[:k])

    def batch(self, position: int, size: int, seed: int = 0) -> Problems:
        """Return the problems at positions position … position+size-1 of an endless stream, reshuffled in every epoch.

        The result depends on the arguments only, so a run resumes from a stored position. Consecutive batches of one size
        contain every problem once per epoch, and no batch contains a problem twice: where a batch crosses the border of
        two epochs, the next epoch moves the problems that this batch already holds behind its end.

        Raises ValueError if `size` exceeds the number of problems.
        """
        if position < 0 or size < 1:
            raise ValueError(f"position must be at least 0 and size at least 1, not {position} and {size}")
        if size > len(self):
            raise ValueError(
                f"a batch of {size} would repeat problems: {self.name} has {len(self)}; set prompts_per_step to at most "
                f"{len(self)}, or load more problems"
            )
        epoch, start = divmod(position, len(self))
        chosen = epoch_order(len(self), seed, epoch, size, position % size)[start : start + size]
        if missing := size - len(chosen):
            chosen = np.concatenate([chosen, epoch_order(len(self), seed, epoch + 1, size, position % size)[:missing]])
        return self._at(chosen)

    def fingerprint(self) -> str:
        """Return 16 hex digits of the ids, prompts and reference answers in their order."""
        rows = json.dumps([[p.id, p.prompt, p.gold] for p in self], sort_keys=True)
        return hashlib.sha256(rows.encode()).hexdigest()[:16]

    def _at(self, indices: Sequence[int]) -> Problems:
        return Problems([self.problems[i] for i in indices], self.name)


def _first(items: Sequence[str]) -> str:
    return ", ".join(items[:5]) + (f", … ({len(items)} in all)" if len(items) > 5 else "")


def _checked_prompt(prompt: Any) -> str | tuple[Message, ...]:
    """Return the prompt as text or as a tuple of messages; raises ValueError for an empty one and for other types."""
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, list | tuple | np.ndarray):
        for message in prompt:
            texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"a chat message needs text under 'role' and 'content', not {message!r}")
        # Parquet stores every key for every message: None if the message does not have it
        prompt = tuple({key: value for key, value in message.items() if value is not None} for message in prompt)
        text = "".join(message["content"] for message in prompt)
    else:
        raise ValueError(f"prompt must be text or a list of chat messages, not {prompt!r}")
    if not text.strip():
        raise ValueError("the prompt is empty")
    return prompt
