"""Figures of one-dimensional regressions."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from pyro_structvi._checks import check_real, checked
from pyro_structvi.posterior.prediction import Prediction


@checked
def plot_regressions(
    predictions: Mapping[str, Prediction],
    grid: Tensor,
    x: Tensor,
    y: Tensor,
    truth: Tensor | None = None,
    limits: tuple[float, float] | None = None,
) -> Any:
    """Draw one panel a method: mean, up to three standard deviations, data and truth.

    Args:
        predictions: What each method predicts on the grid, by the panel's title.
        grid: Inputs ``(N,)`` or ``(N, 1)``, ascending.
        x: Inputs of the data.
        y: Targets of the data.
        truth: The function that made the data, on the grid.
        limits: Range of the vertical axis, in the targets' units; from the data when None.

    Returns:
        A matplotlib figure, attached to no window.

    Raises:
        ValueError: If there is no prediction.

    Example:
        >>> import torch
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, predict
        >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1)), num_data=8, noise_scale=0.1)
        >>> grid = torch.linspace(-1, 1, 20).unsqueeze(-1)
        >>> prediction = predict(model, MeanFieldGuide(model), grid)
        >>> figure = plot_regressions({"mean field": prediction}, grid, grid[::4], grid[::4])
        >>> len(figure.axes)
        1
    """
    if not predictions:
        raise ValueError("`predictions` must hold at least one prediction, but is empty.")
    pairs = [("x", x, "y", y)] + ([] if truth is None else [("grid", grid, "truth", truth)])
    pairs += [
        ("grid", grid, f"predictions['{title}'].mean", own.mean)
        for title, own in predictions.items()
    ]
    for name, values, other, others in pairs:
        check_real(name, values)
        check_real(other, others)
        if values.numel() != others.numel():
            raise ValueError(
                f"`{name}` and `{other}` must have as many values, but got {values.numel()} and "
                f"{others.numel()}."
            )
    columns = min(len(predictions), 4)
    rows = -(-len(predictions) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    line, points = grid.flatten().cpu(), (x.flatten().cpu(), y.flatten().cpu())
    for panel, (title, prediction) in zip(axes, predictions.items(), strict=False):
        mean = prediction.mean.flatten().cpu()
        scale = prediction.variance.flatten().sqrt().cpu()
        for width in (1, 2, 3):
            panel.fill_between(
                line, mean - width * scale, mean + width * scale, color="C0", alpha=0.2, linewidth=0
            )
        panel.plot(line, mean, color="C0", label="mean, up to 3 standard deviations")
        if truth is not None:
            panel.plot(line, truth.flatten().cpu(), color="black", linewidth=0.8, label="truth")
        panel.scatter(*points, s=6, color="C3", zorder=3, label="data")
        panel.set_title(title)
        panel.set_ylim(limits or _padded(points[1]))
    for panel in axes[len(predictions) :]:
        panel.remove()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _padded(y: Tensor) -> tuple[float, float]:
    low, high = float(y.min()), float(y.max())
    padding = (high - low) or 1.0
    return low - padding, high + padding
