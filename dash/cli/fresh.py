"""``python -m dash.cli.fresh INPUTS STRATEGY GROUP_SPLIT DEVICE``: one backward, in a new process.

Prints the digest of dq, dk, dv as JSON. ``python -m dash verify`` starts it.
"""

from __future__ import annotations

import json
import sys

import torch

from dash.cli.problem import Inputs
from dash.cli.repeats import digest


def main(path: str, strategy: str, group_split: str, device: str) -> None:
    saved = torch.load(path, map_location=device, weights_only=True)
    inputs = Inputs(**saved["tensors"], **saved["mask"])
    print(json.dumps(digest(inputs.backward(strategy, int(group_split)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
