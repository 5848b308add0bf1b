"""Warnings that point at the user's line."""

import sys
import warnings
from inspect import getfile
from pathlib import Path

import pyro
import torch

_FOLDERS = (Path(__file__).parents[1], *(Path(getfile(each)).parent for each in (pyro, torch)))
_OURS = tuple(f"{folder}/" for folder in _FOLDERS)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn, as of the first line on the stack that is not of this package, of Pyro or of torch.

    Args:
        message: The warning.
        category: Its class.
    """
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
