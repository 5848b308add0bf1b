"""One page that says what a fitted guide is like."""

import os
from os import PathLike
from pathlib import Path
from typing import Any

from pyro_structvi._checks import Count, Program, Whole, checked, naming
from pyro_structvi.diagnostics.importance import MIN_SAMPLES
from pyro_structvi.diagnostics.report_data import Data, Fitted
from pyro_structvi.infer.history import History
from pyro_structvi.sites.starts import separate_randomness
from pyro_structvi.sites.structured import StructuredGuide


@checked
def report(
    model: Program,
    guide: StructuredGuide,
    data: Any,
    path: str | PathLike[str] = "report.html",
    *,
    test_data: Any = None,
    history: History | None = None,
    num_samples: Count | None = None,
    importance_samples: Whole = 1000,
    batch_size: Count | None = None,
) -> Path:
    """Write a page with tables and figures of what a fitted guide is like.

    The page is one HTML file that needs no other, with these sections, each with a sentence on how to
    read it:

    - what was fitted: the guide's own :meth:`~pyro_structvi.StructuredGuide.report`, in numbers;
    - predictions: scores and calibration, and figures where there are one or two inputs;
    - the evidence lower bound, by its terms, and its trace if there is a ``history``;
    - the distance to the posterior, by :func:`pareto_k`;
    - the noise of gradients, by :func:`gradient_snr`;
    - singular values of means and standard deviations, by :func:`spectra`.

    What cannot be computed for a model or a guide is left out, and the page says why. Nothing is
    trained, and the global state of random numbers stays as it is; the same state gives the same page.

    Args:
        model: The model.
        guide: The guide, fitted to it.
        data: All data that it was fitted to, ``(x, y)`` as in :func:`~pyro_structvi.fit`: inputs with N
            examples, or a tuple of several inputs, and observations.
        path: The file; one that exists is replaced, once the new page is complete.
        test_data: New data ``(x, y)``, at which predictions are scored. When None these are scored at
            ``data``, where they look better than they are, and the page says so.
        history: What ``fit`` returned, for the trace of the bound.
        num_samples: Draws for predictions, as for :func:`~pyro_structvi.predict`.
        importance_samples: Draws for the distance to the posterior, each a pass over all ``data``: at
            least 100, or 0 to leave it out.
        batch_size: Examples that run at once in predictions, and how many random ones of ``data`` the
            terms of the bound and the gradients are of; None for all. As in training, the model must
            then weigh a batch up to all data, as :class:`~pyro_structvi.Regressor` and the others do.

    Returns:
        The path of the file.

    Raises:
        ImportError: If matplotlib is not installed.
        TypeError: If data are no tuple of inputs and a tensor.
        ValueError: If data do not fit the model or each other, a number is out of range, the history has
            no step, or the path is not that of a file in a folder that can be written to.
        OSError: If the file cannot be written; one that was there stays as it was.

    Example:
        >>> import tempfile, torch
        >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize, fit
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(-1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = Regressor(bayesianize(net, prior=1.0), noise_scale=0.1)
        >>> guide = KTiedGuide(model, rank=2)
        >>> history = fit(model, guide, (x, x**2), num_steps=20, progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = report(model, guide, (x, x**2), f"{folder}/page.html", history=history)
        ...     path.name, path.read_text().count("<section")
        ('page.html', 6)
    """
    target = _checked_path(path)
    train = Data.checked("data", data)
    test = None if test_data is None else Data.checked("test_data", test_data)
    if history is not None and not history.elbo:
        raise ValueError("`history` must hold at least one step, but is empty. Pass None.")
    if 0 < importance_samples < MIN_SAMPLES:
        raise ValueError(
            f"`importance_samples` must be at least {MIN_SAMPLES}, for a tail of weights, or 0 to leave "
            f"them out, but got {importance_samples}."
        )
    fitted = Fitted(model, guide, train, test, num_samples, batch_size)
    with separate_randomness():
        text = _page(fitted, history, importance_samples)
    _write(target, text)
    return target


def _page(fitted: Fitted, history: History | None, importance_samples: int) -> str:
    try:
        from pyro_structvi.diagnostics import report_of_fit, report_of_predictions
        from pyro_structvi.diagnostics.report_page import page
    except ImportError as error:
        raise ImportError('matplotlib is needed: `pip install "pyro-structvi[plots]"`.') from error
    with naming("data", fitted.train.args):
        own = fitted.guide.report(*fitted.train.some(fitted.batch_size))
    sections = [
        report_of_fit.parameters(fitted, own),
        report_of_predictions.predictions(fitted),
        report_of_fit.bound(fitted, history),
        report_of_fit.importance(fitted, importance_samples),
        report_of_fit.gradients(fitted),
        report_of_fit.spectra_of_layers(fitted),
    ]
    guide, model = fitted.names
    subtitle = f"Fitted to {len(fitted.train.y):,} examples."
    return page(f"{guide} of a {model}", subtitle, sections)


def _checked_path(path: str | PathLike[str]) -> Path:
    """Return the path of a file that can be written, or raise a ``ValueError``."""
    target = Path(path).resolve()
    folder = target.parent
    if target.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(
            "`path` must be that of a file in a folder that can be written to, but got "
            f"'{path}'. Make the folder first: `pathlib.Path(...).mkdir(parents=True)`."
        )
    return target


def _write(path: Path, text: str) -> None:
    """Write a file beside the one at a path, and let it take that one's place when it is whole."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
