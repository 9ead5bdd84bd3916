"""What was worked out for a signature, kept for the next call that has it."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Remembered(dict[Key, Value]):
    """A dictionary of at most ``limit`` entries; one more, and it begins anew.

    A program has few signatures. One that has a new one in each call gains nothing here, and must
    not fill memory either.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: Key, value: Value) -> None:
        if key not in self and len(self) >= self._limit:
            self.clear()
        super().__setitem__(key, value)
