"""The history of a fit for TensorBoard."""

import os
from typing import Any

from pyro_structvi._checks import Count, check, checked
from pyro_structvi.infer.history import History


class TensorBoard:
    """Writes the history for TensorBoard, as a callback of :func:`~pyro_structvi.fit`.

    Scalars are ``elbo``, ``log_likelihood`` and ``kl`` in nats, ``kl_weight`` and ``lr`` at the number
    of steps taken before, and ``validation`` where that is measured. A run that goes on from a
    checkpoint writes on in the same folder, and what an earlier run wrote after it is hidden.

    Args:
        folder: Where the files are, one folder for each run: ``tensorboard --logdir`` shows it.
        every: How many steps the values are apart.

    Raises:
        ImportError: If the package ``tensorboard`` is missing.
        ValueError: If ``folder`` is empty.

    Example:
        >>> import tempfile, torch
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, fit
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(-1)
        >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), noise_scale=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     board = TensorBoard(folder, every=10)
        ...     guide = MeanFieldGuide(model)
        ...     history = fit(model, guide, (x, x), num_steps=50, progress=False, callbacks=[board])
        ...     len(os.listdir(folder))
        1
    """

    @checked
    def __init__(self, folder: str | os.PathLike[str], every: Count = 1) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                'TensorBoard is needed: `pip install "pyro-structvi[tensorboard]"`.'
            ) from error
        if not os.fspath(folder):
            raise ValueError("`folder` must be the path of a folder, but got ''.")
        self._make: Any = SummaryWriter
        self._folder, self._every = os.fspath(folder), every
        self._writer: Any = None
        self._next = 0  # of the validations

    def __call__(self, history: History) -> None:
        """Write what is new.

        Args:
            history: The history so far, of one step at least.
        """
        check("history", history, History)
        step = len(history.elbo) - 1
        if self._writer is None:
            self._writer = self._make(self._folder, purge_step=step)
            self._next = sum(each < step for each in history.validation_steps)
        if step % self._every == 0:
            for name in ("elbo", "log_likelihood", "kl", "kl_weight", "lr"):
                self._writer.add_scalar(name, getattr(history, name)[-1], step)
        for number in range(self._next, len(history.validation)):
            at = history.validation_steps[number]
            self._writer.add_scalar("validation", history.validation[number], at)
        self._next = len(history.validation)

    def close(self) -> None:
        """Bring all to the disk; a further call goes on."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
