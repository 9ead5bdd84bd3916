"""What ``strategy="auto"`` chooses: an order for each problem, by rules, never by a timing.

The rules are ``csrc/schedule/auto.h``, compiled into the module and into the kernels, which ask
them for each sequence of a packed call. They see one sequence and the device model, so a gradient
does not depend on its neighbours in the batch.
"""

from __future__ import annotations

from typing import NamedTuple

from dash.extension import extension


class Choice(NamedTuple):
    """Attributes: ``strategy``, ``group_split``, and ``why``, one sentence."""

    strategy: str
    group_split: int
    why: str


def choose(problem: object, resident_ctas: int, group_split: int = 0) -> Choice:
    """The order for one sequence of ``problem``.

    Args:
        problem: a ``dash._C.Problem``; its batch and group_split do not matter.
        resident_ctas: of the device model.
        group_split: slices to cut the q heads of a KV head into; 0: the best number.
    """
    return Choice(*extension().choose(problem, resident_ctas, group_split))
