"""The file from which a fit goes on as if it had not been interrupted."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pyro_structvi.infer.ranks import by_first_rank

FORMAT = 1


class CheckpointFile:
    """A file that is whole at any time: a new one takes the old one's place in one step of the system.

    On several processes rank 0 reads and writes, and an error of it is one of all.

    Args:
        path: Where it is.
        resume: Whether to go on from the file if it is there; otherwise it must not be.

    Raises:
        FileExistsError: If there is a file, and ``resume`` is false.
        ValueError: If the folder is missing or cannot be written to, or the file is no checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str], resume: bool) -> None:
        self.path = Path(path).resolve()  # also where the working directory changes
        self.saved: dict[str, Any] | None = by_first_rank(lambda: self._open(resume))

    def write(self, state: Callable[[], dict[str, Any]]) -> None:
        """Put a state in the file's place; rank 0 alone makes it.

        Raises:
            OSError: If that cannot be done; the file is then what it was.
        """
        by_first_rank(lambda: write_atomically(self.path, {"format": FORMAT, **state()}))

    def _open(self, resume: bool) -> dict[str, Any] | None:
        folder = self.path.parent
        if self.path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(
                "`checkpoint` must be the path of a file in a folder that can be written to, but got "
                f"'{self.path}'. Make the folder first: `pathlib.Path(...).mkdir(parents=True)`."
            )
        if not self.path.exists():
            return None
        if not resume:
            raise FileExistsError(
                f"`checkpoint` must be a new file, but '{self.path}' exists. Pass `resume=True` to "
                "go on from it, or another path."
            )
        return _read(self.path)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise a ``ValueError`` unless the settings of the file are those given.

        Args:
            settings: What has to be the same, by its name in the error. Names that the file has not are
                not compared.
        """
        saved = {} if self.saved is None else self.saved["settings"]
        for name, own in settings.items():
            self.check_same(name, own, saved.get(name, own))

    def check_same(self, name: str, own: Any, saved: Any) -> None:
        """Raise a ``ValueError`` unless what a run goes on with is what the file has."""
        if own != saved:
            raise ValueError(
                f"`checkpoint` must go on with what it was begun with, but {name} is {own!r} here, and "
                f"{saved!r} in '{self.path}'. Pass the same, or another path."
            )


def write_atomically(path: Path, state: Any) -> None:
    """Write a file beside the one at a path, have it on the disk, and let it take that one's place.

    Raises:
        OSError: If there is no room, say; the file at the path is then what it was.
    """
    partial = path.with_name(
        f"{path.name}.partial"
    )  # one name, so that a killed write leaves one file
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except Exception as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            f"`checkpoint` could not be written to '{path}', where the last one still is if there was "
            f"one: {error}"
        ) from error
    if os.name == "posix":  # elsewhere folders cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or state["format"] != FORMAT:
            raise KeyError("format")
    except Exception as error:  # torch has many for what is no file of its own
        raise ValueError(
            f"`checkpoint` must be a file that `fit` has written, but '{path}' is not, or not by this "
            "version. Pass another path, or remove it."
        ) from error
    return state | {"path": str(path)}
