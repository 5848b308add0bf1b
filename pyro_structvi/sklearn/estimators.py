"""Bayesian multi-layer perceptrons for tables."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.preprocessing import LabelEncoder
from sklearn.utils import check_array, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from pyro_structvi._checks import Count, NonNegative, check, warn_user
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi.nn import Classifier, Regressor
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.nn.regressors import SMALLEST_FLOOR
from pyro_structvi.posterior.quantiles import MOST_DF
from pyro_structvi.sites.finding import separate_randomness
from pyro_structvi.sklearn.base import (
    Array,
    BayesianMLP,
    all_or_nothing,
    as_weights,
    num_distinct,
    scaler_of,
    to_numpy,
    with_weight,
)

REPEATS = 4  # of a value in the mean, from which targets count as rounded
ROUNDING = 8  # relative spacings of floating point, by which equal values may differ
OFTEN = 0.2  # of the examples, whose common target then has a density without a bound
FEWEST_REPEATED = 10  # distinct examples


class RepeatedTargetsWarning(UserWarning):
    """Many targets have the same value, whose density has no bound."""


@dataclass(eq=False, repr=False)
class BayesianMLPRegressor(RegressorMixin, BayesianMLP):
    r"""Bayesian regression by a multi-layer perceptron with heteroscedastic noise.

    Inputs and targets are standardized inside. The prior of each weight and bias is
    :math:`N(0, \texttt{prior\_scale}^2)`. By default the posterior is sampled by microcanonical Langevin
    chains that start at ``num_members`` points of maximum posterior density. With more than 10,000
    examples the posterior is a mixture of normals around these points. With ``refine=False`` the points
    are a deep ensemble.

    Chains and mixtures that start at points have another prior,
    :class:`~pyro_structvi.distributions.IsotropicStudentT` with the scale ``prior_scale / 2``: each
    weight matrix and each bias learns its scale from the data. With chains, the weights of each input of
    the hidden layers have a scale of their own (automatic relevance determination), with one degree of
    freedom and the scale ``prior_scale / 10``, so that irrelevant inputs cost little.

    Args:
        hidden_layer_sizes: The numbers of units of the hidden layers, or of a single one.
        activation: "silu", "tanh" or "relu".
        skip: Whether a linear map of the inputs is added to the output of the layers (skip-layer
            connections); "auto" for at most as many inputs as distinct rows, if there are hidden layers.
        prior_scale: The standard deviation of the prior of weights; with D > 16 inputs, the weights of
            inputs have ``sqrt(16 / D)`` times as much.
        prior_df: The degrees of freedom of the prior of chains and mixtures; None for the normal prior
            of the points, whose functions vary more, between and away from the data.
        posterior: "ensemble" for points; "mixture" for mean-field normals around these points; "auto"
            for a mixture if ``refine`` is "auto" and there are more than 10,000 examples, else for
            points; "map", "dropout", "mean_field", "k_tied", "low_rank", "matrix_normal", "rowwise",
            "full_covariance", "inducing" or "global_inducing" for one guide; or a function from a model
            to a guide.
        num_members: The number of members of a mixture or ensemble, and of chains.
        num_steps: The number of training steps of a guide.
        batch_size: The number of examples in a training step; all if there are fewer.
        validation_fraction: The share of examples that is held out to stop the training of points that
            are not refined; none when 0, and else at least 20, or a fifth of less than 100.
        refine: Whether to sample by :func:`~pyro_structvi.reference.mclmc` from the guide; "auto" for at
            most 10,000 examples, since each step takes all of them.
        num_sampling_steps: The number of steps of each chain, six tenths for warm-up.
        energy_variance: See :func:`~pyro_structvi.reference.mclmc`; smaller values have less bias and
            need more steps.
        kl_weight: The weight of the KL of a guide that has no points. "auto" is 1, and for a mixture
            0.3, 0.1 or, for classes, 0.03 (a cold posterior), whichever predicts held-out rows better;
            0.3 if no rows are held out, or fewer than 100 for classes, or if the mixture is refined.
        dtype: "float32" or "float64".
        device: The device, as torch names it.
        random_state: A seed or a ``RandomState``.
        progress: Whether to show progress bars.
        noise_df: The degrees of freedom of the noise, which has a Student's t distribution, robust to
            outliers, above 1 and at most 200; "learned" for a posterior over them; None for normal
            noise.
        noise_floor: The noise has at least this scale, in the targets' units. "auto" is none, or for
            targets with a quarter as many values as there are distinct examples, such as counts and
            ratings, the least spacing of the values over the root of 12, the deviation of rounding.
            Values that differ by the rounding of arithmetic are one.

    Attributes:
        model_: The model, of standardized targets.
        guide_: The fitted guide.
        draws_: Draws of the posterior by site; draws of chains have ``r_hat``.
        posterior_: The posterior, which "auto" chooses by ``refine`` and the number of examples.
        kl_weight_: The weight of the KL of a guide that has no points.
        x_scaler_: The scaling of inputs.
        y_scaler_: The scaling of targets.
        noise_floor_: The floor of the noise, in the targets' units.
        n_features_in_: The number of inputs.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 40).reshape(-1, 1)
        >>> estimator = BayesianMLPRegressor(num_members=3, num_steps=50, refine=False)
        >>> mean, std = estimator.fit(X, X[:, 0] ** 2).predict(X, return_std=True)
        >>> mean.shape, estimator.predict_interval(X, level=0.9).shape
        ((40,), (40, 2))

    References:
        Sommer, Robnik, Nozadze, Seljak and Ruegamer (2025), "Microcanonical Langevin ensembles:
        advancing the sampling of Bayesian neural networks".
    """

    # With 1 normals are far too wide where the noise is small.
    kl_weights_of_mixture = 0.3, 0.1

    noise_df: float | Literal["learned"] | None = field(default=5.0, kw_only=True)
    noise_floor: float | Literal["auto"] = field(default="auto", kw_only=True)

    @all_or_nothing
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the posterior.

        Args:
            X: Inputs ``(N, features)``.
            y: Targets ``(N,)``.
            sample_weight: Weights of the examples' log likelihoods ``(N,)``; an example of weight 2
                counts twice.

        Raises:
            ValueError: If an argument is out of range, or holds NaN.
        """
        inputs, targets = validate_data(self, X, y, dtype=np.float64, order="C", y_numeric=True)
        if targets.dtype.kind not in "biuf":
            raise ValueError(
                f"`y` must be numbers, but got dtype {targets.dtype}. Convert it, such as by "
                "`y.astype(float)`, or fit a BayesianMLPClassifier to classes."
            )
        weights = as_weights(sample_weight, inputs)
        inputs, targets, weights = with_weight(inputs, targets, weights)
        column = np.asarray(targets, dtype=np.float64).reshape(-1, 1)
        self.y_scaler_ = scaler_of(column, weights)
        check("noise_floor", self.noise_floor, NonNegative | Literal["auto"])
        if self.noise_floor == "auto":
            joined = _joined(column[:, 0], np.finfo(np.result_type(targets, np.float32)).eps)
            values, counts = np.unique(joined, return_counts=True)
            self.noise_floor_ = _scale_of_rounding(values, inputs, joined)
            if not self.noise_floor_:
                _warn_of_repeated(values[counts.argmax()], inputs, joined)
        else:
            self.noise_floor_ = float(self.noise_floor)
        return self._fit(inputs, self.y_scaler_.transform(column)[:, 0], weights, 2)

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """Return predictive medians ``(N,)``, and with ``return_std`` standard deviations with noise.

        Medians are robust to draws that are outliers far from the data.
        """
        found = [(each.quantile(0.5), each.variance) for each in self._predictions(X)]
        median, variance = (torch.cat(parts) for parts in zip(*found, strict=True))
        if not return_std:
            return self._in_units(median)
        std = to_numpy(variance.sqrt())[:, 0]
        return self._in_units(median), std * self.y_scaler_.scale_[0]

    def predict_interval(self, X: ArrayLike, level: float = 0.95) -> Array:
        """Return lower and upper bounds ``(N, 2)`` of the central predictive interval."""
        found = [torch.stack(each.interval(level), -2) for each in self._predictions(X)]
        return self._in_units(torch.cat(found))

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> Array:
        """Return draws of the predictive distribution ``(N, n_samples)``."""
        check_is_fitted(self)
        check("n_samples", n_samples, Count)
        repeats = math.ceil(n_samples / self._num_draws)
        with ONE_THREAD, separate_randomness():
            torch.manual_seed(check_random_state(random_state).randint(2**31 - 1))
            chosen = torch.randperm(self._num_draws)[:n_samples]  # the same for all rows
            draws = {name: values[chosen] for name, values in self.draws_.items()}
            predictions = self._predictions(X, draws=draws)
            found = [each.sample_observations(repeats)[:n_samples] for each in predictions]
        return self._in_units(torch.cat(found, 1)).T

    def log_density(self, X: ArrayLike, y: ArrayLike) -> Array:
        """Return the log predictive density of targets ``(N,)``, in nats, in their own units."""
        check_is_fitted(self)
        column = check_array(column_or_1d(y), dtype=np.float64, ensure_2d=False, input_name="y")
        column = column.reshape(-1, 1)
        check_consistent_length(X, column)
        predictions = self._predictions(X, torch.as_tensor(self.y_scaler_.transform(column)))
        found = np.concatenate([to_numpy(each.log_density) for each in predictions])
        return found - np.log(self.y_scaler_.scale_[0])

    def _likelihood(self, net: nn.Module) -> Likelihood:
        df = self.noise_df
        if df not in (None, "learned") and (isinstance(df, str) or not 1 < df <= MOST_DF):
            raise ValueError(
                f'`noise_df` must be above 1 and at most {MOST_DF}, "learned", or None for normal '
                f"noise, but got {df!r}."
            )
        floor = max(SMALLEST_FLOOR, self.noise_floor_ / self.y_scaler_.scale_[0])
        return Regressor(net, noise="heteroscedastic", df=self.noise_df, noise_floor=floor)

    def _in_units(self, values: Tensor) -> Array:
        scaled = to_numpy(values)[..., 0]
        return scaled * self.y_scaler_.scale_[0] + self.y_scaler_.mean_[0]


def _joined(targets: Array, eps: float) -> Array:
    """Return targets with one value in place of those that differ by the rounding of arithmetic."""
    values, place = np.unique(targets, return_inverse=True)
    is_new = np.diff(values, prepend=-np.inf) > ROUNDING * eps * np.abs(values).max()
    return values[is_new][is_new.cumsum()[place] - 1]


def _scale_of_rounding(values: Array, inputs: Array, targets: Array) -> float:
    """Return the standard deviation of rounding to a few distinct values, or 0 for many."""
    if not 1 < len(values) <= len(targets) / REPEATS:  # which saves sorting a large table
        return 0.0
    is_rounded = len(values) <= num_distinct(np.column_stack([inputs, targets])) / REPEATS
    return float(np.diff(values).min() / math.sqrt(12)) if is_rounded else 0.0


def _warn_of_repeated(value: float, inputs: Array, targets: Array) -> None:
    is_value = targets == value
    is_common = OFTEN <= (share := is_value.mean()) < 1
    if is_common and num_distinct(inputs[is_value]) >= FEWEST_REPEATED:
        warn_user(
            f"{share:.0%} of the targets are {value:.6g}. Their density has no bound, "
            "so the noise there shrinks, and standard deviations elsewhere may be far too large. Pass "
            "`noise_floor`, the least scale of the noise, or fit a classifier for this value and a "
            "regressor for the others.",
            RepeatedTargetsWarning,
        )


@dataclass(eq=False, repr=False)
class BayesianMLPClassifier(ClassifierMixin, BayesianMLP):
    """Bayesian classification by a multi-layer perceptron.

    It has the other arguments and attributes of :class:`BayesianMLPRegressor`, except ``noise_df``,
    ``noise_floor``, ``noise_floor_`` and ``y_scaler_``.

    Args:
        class_weight: Weights of the classes' log likelihoods, a dictionary, or "balanced" for weights
            inversely proportional to their frequencies, which count examples by ``sample_weight``.

    Attributes:
        classes_: The classes; ``model_`` has their numbers.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 40).reshape(-1, 1)
        >>> estimator = BayesianMLPClassifier(num_members=3, num_steps=50, refine=False)
        >>> estimator.fit(X, np.where(X[:, 0] > 0, "right", "left")).predict([[-0.9], [0.9]]).tolist()
        ['left', 'right']
    """

    kl_weights_of_mixture = 0.3, 0.1, 0.03
    # A mixture may be certain of a wrong class with less than 0.3, which few rows do not show.
    fewest_compared = 100

    class_weight: Any = field(default=None, kw_only=True)

    @all_or_nothing
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the posterior to inputs ``(N, features)`` and classes ``(N,)``.

        ``sample_weight`` as for :meth:`BayesianMLPRegressor.fit`.

        Raises:
            ValueError: If an argument is out of range, ``X`` holds NaN, or there is a single class.
        """
        inputs, labels = validate_data(self, X, y, dtype=np.float64, order="C")
        check_classification_targets(labels)
        weights = as_weights(sample_weight, inputs)
        inputs, labels, weights = with_weight(inputs, labels, weights)
        if self.class_weight is not None:
            classes, number = np.unique(labels, return_inverse=True)
            of_classes = compute_class_weight(
                self.class_weight, classes=classes, y=labels, sample_weight=weights
            )
            if not (np.isfinite(of_classes) & (of_classes >= 0)).all():
                raise ValueError(
                    "`class_weight` must have finite weights that are not negative, but got "
                    f"{self.class_weight!r}."
                )
            weights = of_classes[number] if weights is None else weights * of_classes[number]
            inputs, labels, weights = with_weight(inputs, labels, weights)
        encoder = LabelEncoder().fit(labels)
        self.classes_ = encoder.classes_
        if len(self.classes_) < 2:
            raise ValueError("`y` must have at least two classes, but got 1 class.")
        return self._fit(inputs, encoder.transform(labels), weights, len(self.classes_))

    def predict_proba(self, X: ArrayLike) -> Array:
        """Return predictive probabilities of the classes ``(N, classes)``."""
        probabilities = np.concatenate([to_numpy(each.mean) for each in self._predictions(X)])
        probabilities /= probabilities.sum(-1, keepdims=True)
        return probabilities

    def predict_log_proba(self, X: ArrayLike) -> Array:
        """Return log predictive probabilities of the classes ``(N, classes)``."""
        found = [each.likelihood.logits.double().logsumexp(0) for each in self._predictions(X)]
        return to_numpy(torch.cat(found).log_softmax(-1))

    def predict(self, X: ArrayLike) -> Array:
        """Return the most probable classes ``(N,)``."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(-1)]

    def _likelihood(self, net: nn.Module) -> Likelihood:
        return Classifier(net)
