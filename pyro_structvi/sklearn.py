"""Estimators of scikit-learn for tables: Bayesian multi-layer perceptrons."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.preprocessing import LabelEncoder, StandardScaler
from sklearn.utils import check_array, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from pyro_structvi import guides
from pyro_structvi._checks import Count, Positive, Share, check
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi.infer import Validation, fit
from pyro_structvi.nn import Classifier, Regressor, bayesianize
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.posterior import Prediction, predict
from pyro_structvi.posterior.quantiles import MOST_DF
from pyro_structvi.reference.mclmc import NotMixedWarning, mclmc
from pyro_structvi.sites.finding import separate_randomness
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.points import are_points
from pyro_structvi.structures.student_t import IsotropicStudentT

Array = NDArray[Any]

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}
POSTERIORS: dict[str, Callable[..., StructuredGuide]] = {
    "map": guides.MAPGuide,
    "dropout": guides.MCDropoutGuide,
    "mean_field": guides.MeanFieldGuide,
    "k_tied": guides.KTiedGuide,
    "low_rank": partial(guides.LowRankGuide, rank=5, join_bias=True),
    "matrix_normal": partial(guides.MatrixNormalGuide, join_bias=True),
    "rowwise": guides.RowwiseGuide,
    "full_covariance": partial(guides.FullCovarianceGuide, join_bias=True),
    "inducing": guides.InducingWeightGuide,
    "global_inducing": guides.GlobalInducingGuide,
}
OPTIONS: dict[str, Any] = {  # and their ranges
    "prior_scale": Positive,
    "prior_df": Positive | None,
    "num_members": Count,
    "num_steps": Count,
    "batch_size": Count,
    "validation_fraction": Share,
    "num_sampling_steps": Count,
    "energy_variance": Positive,
    "dtype": Literal["float32", "float64"],
    "progress": bool,
}
REFINED = 10_000  # examples at most that "auto" refines, since each step takes all of them
NUM_DRAWS = 200  # of a guide
DRAWS_OF_CHAIN = 100
FUNCTIONS_AT_A_TIME = 500_000  # of all draws and rows, in a pass of a prediction
KL_WEIGHT_OF_MIXTURE = 0.1  # with 1 normals are far too wide where the noise is small
INITIAL_ENERGY_VARIANCE = 0.2  # of chains, whose large steps at first explore beyond the points


@dataclass(eq=False, repr=False)
class _BayesianMLP(BaseEstimator):
    """The common part of the regressor and the classifier."""

    hidden_layer_sizes: Sequence[int] | int = (16, 16, 16, 16)
    _: KW_ONLY
    activation: str = "silu"
    prior_scale: float = 1.0
    prior_df: float | None = 4.0
    posterior: str | Callable[..., StructuredGuide] = "ensemble"
    num_members: int = 10
    num_steps: int = 1500
    batch_size: int = 2000
    validation_fraction: float = 0.1
    refine: bool | Literal["auto"] = "auto"
    num_sampling_steps: int = 20_000
    energy_variance: float = 0.02
    dtype: str = "float32"
    device: str = "cpu"
    random_state: Any = None
    progress: bool = False

    @property
    def partial_fit(self) -> Any:
        """Not defined, since the posterior depends on all the data.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(
            f"`partial_fit` is not defined for {type(self).__name__}, whose posterior depends on all "
            "the data. Call `fit` with all of them."
        )

    @torch.inference_mode(False)
    def _fit(self, inputs: Array, targets: Array, weights: Array | None, num_outputs: int) -> Self:
        """Fit the posterior, and keep draws of it."""
        for name, expected in OPTIONS.items():
            check(name, getattr(self, name), expected)
        self.x_scaler_ = StandardScaler().fit(inputs, sample_weight=weights)
        data = [self._as_inputs(inputs), torch.as_tensor(targets, device=self.device)]
        if data[1].is_floating_point():
            data[1] = data[1].to(data[0].dtype).unsqueeze(-1)
        if weights is not None:
            data.append(torch.as_tensor(weights).to(data[0]))
        with ONE_THREAD, separate_randomness():
            torch.manual_seed(check_random_state(self.random_state).randint(2**31 - 1))
            net = self._net(inputs.shape[1], num_outputs).to(self.device)
            self.model_ = self._likelihood(bayesianize(net, prior=self.prior_scale))
            self.guide_ = self._fitted_guide(tuple(data))
            has_starts = self._is_refined(len(data[0])) and are_points(self.guide_.all_posteriors())
            if has_starts and self.prior_df is not None:
                self._learn_scales(net, self.prior_df, tuple(data))
            self.draws_ = self._draws(tuple(data))
        return self

    def _net(self, num_inputs: int, num_outputs: int) -> nn.Module:
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"`activation` must be one of {[*ACTIVATIONS]}, but got {self.activation!r}."
            )
        hidden = np.atleast_1d(np.asarray(self.hidden_layer_sizes, dtype=object)).tolist()
        if not all(isinstance(size, int | np.integer) and size > 0 for size in hidden):
            raise ValueError(
                "`hidden_layer_sizes` must be whole numbers of at least 1, but got "
                f"{self.hidden_layer_sizes!r}."
            )
        sizes = [num_inputs, *map(int, hidden)]
        linear = partial(nn.Linear, dtype=getattr(torch, self.dtype))  # of random starts, too
        layers: list[nn.Module] = []
        for size, next_size in pairwise(sizes):
            layers += [linear(size, next_size), ACTIVATIONS[self.activation]()]
        return nn.Sequential(*layers, linear(sizes[-1], num_outputs))

    def _likelihood(self, net: nn.Module) -> Likelihood:
        raise NotImplementedError

    def _is_refined(self, num_data: int) -> bool:
        if self.refine not in (True, False, "auto"):
            raise ValueError(f'`refine` must be True, False or "auto", but got {self.refine!r}.')
        return num_data <= REFINED if self.refine == "auto" else bool(self.refine)

    def _guide(self) -> StructuredGuide:
        ensemble = partial(guides.EnsembleGuide, size=self.num_members)
        make: dict[str, Callable[..., StructuredGuide]] = {
            "ensemble": ensemble,
            "mixture": ensemble,  # of the points that it starts at
            **POSTERIORS,
        }
        if not callable(self.posterior) and self.posterior not in make:
            raise ValueError(
                f"`posterior` must be one of {[*make]} or a function from a model to a guide, but got "
                f"{self.posterior!r}."
            )
        own = self.posterior if callable(self.posterior) else make[self.posterior]
        guide: StructuredGuide = own(self.model_)
        return guide

    def _fitted_guide(self, data: tuple[Tensor, ...]) -> StructuredGuide:
        guide, num_data = self._guide(), len(data[0])
        if self.posterior == "mixture":
            self._train(guide, data)
            mixture = guides.MixtureGuide(
                *(self.model_, guides.MeanFieldGuide, self.num_members), starts=guide
            )
            self._train(mixture, data, kl_weight=KL_WEIGHT_OF_MIXTURE)
            return mixture
        options: dict[str, Any] = {}
        held_out = int(self.validation_fraction * num_data)
        if are_points(guide.all_posteriors()) and held_out and not self._is_refined(num_data):
            # Points that fit every example learn a noise of nearly nothing.
            order = torch.randperm(num_data, device=data[0].device)
            other = tuple(part[order[:held_out]] for part in data)
            data = tuple(part[order[held_out:]] for part in data)
            metric = partial(_weighted_log_density, other[2]) if len(other) > 2 else None
            held = other[0], other[1]
            options["validation"] = Validation(held, metric, every=10, patience=30)
        self._train(guide, data, **options)
        return guide

    def _train(self, guide: StructuredGuide, data: tuple[Tensor, ...], **options: Any) -> None:
        fit(
            *(self.model_, guide, data),
            num_steps=self.num_steps,
            batch_size=self.batch_size if self.batch_size < len(data[0]) else None,
            compiled="traced",  # its numbers do not depend on measured times
            progress=self.progress,
            **options,
        )

    def _learn_scales(self, net: nn.Module, df: float, data: tuple[Tensor, ...]) -> None:
        """Replace the prior of the model and of its points by one that learns the layers' scales.

        Its density is highest where whole layers are zero, so points are found under normals.
        """
        points = self.guide_.state_dict()
        like = next(net.parameters())
        own, scale = like.new_tensor(df), like.new_tensor(self.prior_scale / 2)
        prior = bayesianize(net, lambda name, value: IsotropicStudentT(own, scale, value.shape))
        self.model_ = self._likelihood(prior)
        self.model_.num_data = len(data[0])
        self.guide_ = self._guide()
        self.guide_.initialize(*data)
        self.guide_.load_state_dict(points)

    @torch.no_grad()
    def _draws(self, data: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return draws of the posterior by site, from chains or from the guide."""
        guide = self.guide_
        if self._is_refined(len(data[0])):
            warmup = max(1, 6 * self.num_sampling_steps // 10)
            thinning = max(1, (self.num_sampling_steps - warmup) // DRAWS_OF_CHAIN)
            with warnings.catch_warnings():
                # Chains stay in their basins; `draws_.r_hat` is the measure of their disagreement.
                warnings.simplefilter("ignore", NotMixedWarning)
                return mclmc(
                    *(self.model_, guide, data),
                    num_warmup=warmup,
                    num_draws=max(4, (self.num_sampling_steps - warmup) // thinning),
                    num_chains=self.num_members,
                    thinning=thinning,
                    energy_variance=self.energy_variance,
                    initial_energy_variance=max(INITIAL_ENERGY_VARIANCE, self.energy_variance),
                    seed=int(torch.randint(2**31, ())),
                    progress=self.progress,
                )
        size = guide.num_members if are_points(guide.all_posteriors()) else NUM_DRAWS
        return guide.joint_posterior().draw_many(range(size))

    def _as_inputs(self, inputs: Array) -> Tensor:
        scaled = self.x_scaler_.transform(inputs)
        return torch.as_tensor(scaled, dtype=getattr(torch, self.dtype), device=self.device)

    @property
    def _num_draws(self) -> int:
        return len(next(iter(self.draws_.values())))

    def _predictions(self, X: ArrayLike, y: Tensor | None = None) -> Iterator[Prediction]:
        """Yield predictions of some rows at a time, so that memory does not grow with their number."""
        check_is_fitted(self)
        rows = validate_data(self, X, dtype=np.float64, order="C", reset=False)
        inputs = self._as_inputs(rows)
        size = max(1, FUNCTIONS_AT_A_TIME // self._num_draws)
        for rows in torch.arange(len(inputs)).split(size):
            own = None if y is None else y[rows]
            yield predict(self.model_, self.draws_, inputs[rows], y=own)


def _weighted_log_density(weights: Tensor, prediction: Prediction, y: Tensor) -> float:
    assert prediction.log_density is not None
    return float(weights @ prediction.log_density / weights.sum())


def _to_numpy(values: Tensor | None) -> Array:
    assert values is not None
    array: Array = values.detach().double().cpu().numpy()
    return array


def _as_weights(sample_weight: ArrayLike | None, inputs: Array) -> Array | None:
    """Return the weights of examples, positive for one at least."""
    if sample_weight is None:
        return None
    weights: Array = check_array(
        sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight"
    )
    if weights.ndim != 1:
        raise ValueError(f"`sample_weight` must be one-dimensional, but got shape {weights.shape}.")
    check_consistent_length(weights, inputs)
    if (weights < 0).any() or not weights.any():
        raise ValueError("`sample_weight` must not be negative, and not zero for all examples.")
    return weights


def _with_weight(
    inputs: Array, targets: Array, weights: Array | None
) -> tuple[Array, Array, Array | None]:
    """Return the examples of positive weight."""
    if weights is None:
        return inputs, targets, None
    return inputs[weights > 0], targets[weights > 0], weights[weights > 0]


@dataclass(eq=False, repr=False)
class BayesianMLPRegressor(RegressorMixin, _BayesianMLP):
    r"""Bayesian regression by a multi-layer perceptron with heteroscedastic noise.

    Inputs and targets are standardized inside. The prior of each weight and bias is
    :math:`N(0, \texttt{prior\_scale}^2)`. By default the posterior is sampled by microcanonical Langevin
    chains that start at ``num_members`` points of maximum posterior density. With ``refine=False`` these
    points are a deep ensemble.

    Chains from points have another prior, :class:`~pyro_structvi.distributions.IsotropicStudentT` with
    the scale ``prior_scale / 2``: each weight matrix and each bias learns its scale from the data.

    Args:
        hidden_layer_sizes: The numbers of units of the hidden layers, or of a single one.
        activation: "silu", "tanh" or "relu".
        prior_scale: The standard deviation of the prior of weights.
        prior_df: The degrees of freedom of the chains' prior; None for the normal prior of the points,
            whose functions vary more, between and away from the data.
        posterior: "ensemble" for points; "mixture" for mean-field normals around these points, fitted
            with a weight of the KL of 0.1 (a cold posterior); "map", "dropout", "mean_field", "k_tied",
            "low_rank", "matrix_normal", "rowwise", "full_covariance", "inducing" or "global_inducing"
            for one guide; or a function from a model to a guide.
        num_members: The number of members of a mixture or ensemble, and of chains.
        num_steps: The number of training steps of a guide.
        batch_size: The number of examples in a training step; all if there are fewer.
        validation_fraction: The share of examples that is held out to stop the training of points that
            are not refined; none when 0.
        refine: Whether to sample by :func:`~pyro_structvi.reference.mclmc` from the guide; "auto" for at
            most 10,000 examples, since each step takes all of them.
        num_sampling_steps: The number of steps of each chain, six tenths for warm-up.
        energy_variance: See :func:`~pyro_structvi.reference.mclmc`; smaller values have less bias and
            need more steps.
        dtype: "float32" or "float64".
        device: The device, as torch names it.
        random_state: A seed or a ``RandomState``.
        progress: Whether to show progress bars.
        noise_df: The degrees of freedom of the noise, which has a Student's t distribution, robust to
            outliers, above 1 and at most 200; None for normal noise.

    Attributes:
        model_: The model, of standardized targets.
        guide_: The fitted guide.
        draws_: Draws of the posterior by site; draws of chains have ``r_hat``.
        x_scaler_: The scaling of inputs.
        y_scaler_: The scaling of targets.
        n_features_in_: The number of inputs.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 40).reshape(-1, 1)
        >>> estimator = BayesianMLPRegressor(num_members=3, num_steps=200, refine=False)
        >>> mean, std = estimator.fit(X, X[:, 0] ** 2).predict(X, return_std=True)
        >>> mean.shape, estimator.predict_interval(X, level=0.9).shape
        ((40,), (40, 2))

    References:
        Sommer, Robnik, Nozadze, Seljak and Ruegamer (2025), "Microcanonical Langevin ensembles:
        advancing the sampling of Bayesian neural networks".
    """

    noise_df: float | None = field(default=5.0, kw_only=True)

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
        weights = _as_weights(sample_weight, inputs)
        inputs, targets, weights = _with_weight(inputs, targets, weights)
        column = np.asarray(targets, dtype=np.float64).reshape(-1, 1)
        self.y_scaler_ = StandardScaler().fit(column, sample_weight=weights)
        return self._fit(inputs, self.y_scaler_.transform(column)[:, 0], weights, 2)

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """Return predictive medians ``(N,)``, and with ``return_std`` standard deviations with noise.

        Medians are robust to draws that are outliers far from the data.
        """
        found = [(each.quantile(0.5), each.variance) for each in self._predictions(X)]
        median, variance = (torch.cat(parts) for parts in zip(*found, strict=True))
        if not return_std:
            return self._in_units(median)
        std = _to_numpy(variance.sqrt())[:, 0]
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
            chosen = torch.randperm(repeats * self._num_draws)[:n_samples]  # the same for all rows
            predictions = self._predictions(X)
            found = [each.sample_observations(repeats)[chosen] for each in predictions]
        return self._in_units(torch.cat(found, 1)).T

    def log_density(self, X: ArrayLike, y: ArrayLike) -> Array:
        """Return the log predictive density of targets ``(N,)``, in nats, in their own units."""
        check_is_fitted(self)
        column = column_or_1d(y, dtype=np.float64).reshape(-1, 1)
        check_consistent_length(X, column)
        scaled = torch.as_tensor(self.y_scaler_.transform(column), device=self.device)
        predictions = self._predictions(X, scaled.to(getattr(torch, self.dtype)))
        found = np.concatenate([_to_numpy(each.log_density) for each in predictions])
        densities: Array = found - np.log(self.y_scaler_.scale_[0])
        return densities

    def _likelihood(self, net: nn.Module) -> Likelihood:
        if self.noise_df is not None and not 1 < self.noise_df <= MOST_DF:
            raise ValueError(
                f"`noise_df` must be above 1 and at most {MOST_DF}, or None for normal noise, but got "
                f"{self.noise_df!r}."
            )
        return Regressor(net, noise="heteroscedastic", df=self.noise_df)

    def _in_units(self, values: Tensor) -> Array:
        scaled = _to_numpy(values)[..., 0]
        array: Array = scaled * self.y_scaler_.scale_[0] + self.y_scaler_.mean_[0]
        return array


@dataclass(eq=False, repr=False)
class BayesianMLPClassifier(ClassifierMixin, _BayesianMLP):
    """Bayesian classification by a multi-layer perceptron.

    It takes the further arguments of :class:`BayesianMLPRegressor`.

    Args:
        class_weight: Weights of the classes' log likelihoods, a dictionary, or "balanced" for weights
            inversely proportional to their frequencies, which count examples by ``sample_weight``.

    Attributes:
        model_: The model, of the numbers of classes.
        guide_: The fitted guide.
        draws_: Draws of the posterior by site.
        x_scaler_: The scaling of inputs.
        classes_: The classes.
        n_features_in_: The number of inputs.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 40).reshape(-1, 1)
        >>> estimator = BayesianMLPClassifier(num_members=3, num_steps=200, refine=False)
        >>> estimator.fit(X, np.where(X[:, 0] > 0, "right", "left")).predict([[-0.9], [0.9]]).tolist()
        ['left', 'right']
    """

    class_weight: Any = field(default=None, kw_only=True)

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the posterior to inputs ``(N, features)`` and classes ``(N,)``.

        Args:
            X: Inputs.
            y: Classes.
            sample_weight: Weights of the examples' log likelihoods ``(N,)``.

        Raises:
            ValueError: If an argument is out of range, ``X`` holds NaN, or there is a single class.
        """
        inputs, labels = validate_data(self, X, y, dtype=np.float64, order="C")
        check_classification_targets(labels)
        weights = _as_weights(sample_weight, inputs)
        inputs, labels, weights = _with_weight(inputs, labels, weights)
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
            inputs, labels, weights = _with_weight(inputs, labels, weights)
        encoder = LabelEncoder().fit(labels)
        self.classes_ = encoder.classes_
        if len(self.classes_) < 2:
            raise ValueError("`y` must have at least two classes, but got 1 class.")
        return self._fit(inputs, encoder.transform(labels), weights, len(self.classes_))

    def predict_proba(self, X: ArrayLike) -> Array:
        """Return predictive probabilities of the classes ``(N, classes)``."""
        probabilities = np.concatenate([_to_numpy(each.mean) for each in self._predictions(X)])
        probabilities /= probabilities.sum(-1, keepdims=True)
        return probabilities

    def predict_log_proba(self, X: ArrayLike) -> Array:
        """Return log predictive probabilities of the classes ``(N, classes)``."""
        found = [each.likelihood.logits.double().logsumexp(0) for each in self._predictions(X)]
        return _to_numpy(torch.cat(found).log_softmax(-1))

    def predict(self, X: ArrayLike) -> Array:
        """Return the most probable classes ``(N,)``."""
        probabilities = self.predict_proba(X)
        found: Array = self.classes_[probabilities.argmax(-1)]
        return found

    def _likelihood(self, net: nn.Module) -> Likelihood:
        return Classifier(net)
