"""The common part of estimators: scaling, starts, the posterior, and its draws."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass
from functools import partial, wraps
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_array, check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from pyro_structvi import guides
from pyro_structvi._checks import Count, Positive, Share, brief, check
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi.infer import SampledKLWarning, Validation, VanishingNoiseWarning, fit
from pyro_structvi.nn import bayesianize
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.posterior import Prediction, predict
from pyro_structvi.reference.draws import NotMixedWarning
from pyro_structvi.reference.mclmc import mclmc
from pyro_structvi.sites.finding import separate_randomness
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.points import are_points
from pyro_structvi.structures.student_t import IsotropicStudentT

Array = NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])

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
    "skip": bool | Literal["auto"],
    "refine": bool | Literal["auto"],
    "prior_scale": Positive,
    "prior_df": Positive | None,
    "num_members": Count,
    "num_steps": Count,
    "batch_size": Count,
    "validation_fraction": Share,
    "num_sampling_steps": Count,
    "energy_variance": Positive,
    "kl_weight": Positive | Literal["auto"],
    "dtype": Literal["float32", "float64"],
    "progress": bool,
}
REFINED = 10_000  # examples at most that "auto" refines, since each step takes all of them
NUM_DRAWS = 200  # of a guide
FEWEST_HELD_OUT = 20  # rows, or a fifth of all
DRAWS_OF_CHAIN = 100
MANY_INPUTS = 16  # more of them would add up to functions that vary too much
OF_HIDDEN_INPUTS = ("0.weight", "net.0.weight")  # in a net without and with a linear map
OF_INPUTS = (*OF_HIDDEN_INPUTS, "skip.weight")
FUNCTIONS_AT_A_TIME = 500_000  # of all draws and rows, in a pass of a prediction
INITIAL_ENERGY_VARIANCE = 0.2  # of chains, whose large steps at first explore beyond the points


class WithSkip(nn.Module):
    """A net and a linear map of its inputs, whose sum is the output."""

    def __init__(self, net: nn.Module, skip: nn.Module) -> None:
        super().__init__()
        self.net, self.skip = net, skip

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum for inputs ``(N, features)``."""
        return self.net(x) + self.skip(x)


@dataclass(eq=False, repr=False)
class BayesianMLP(BaseEstimator):
    """The common part of the regressor and the classifier.

    Attributes:
        kl_weights_of_mixture: The weights of the KL that "auto" compares, from the largest.
        fewest_compared: The number of held-out rows that the comparison needs.
    """

    kl_weights_of_mixture: ClassVar[tuple[float, ...]]
    fewest_compared: ClassVar[int] = 1

    hidden_layer_sizes: Sequence[int] | int = (16, 16, 16, 16)
    _: KW_ONLY
    activation: str = "silu"
    skip: bool | Literal["auto"] = "auto"
    prior_scale: float = 1.0
    prior_df: float | None = 4.0
    posterior: str | Callable[..., StructuredGuide] = "auto"
    num_members: int = 10
    num_steps: int = 1500
    batch_size: int = 2000
    validation_fraction: float = 0.1
    refine: bool | Literal["auto"] = "auto"
    num_sampling_steps: int = 20_000
    energy_variance: float = 0.005
    kl_weight: float | Literal["auto"] = "auto"
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
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        self.posterior_ = self._chosen_posterior(inputs)
        with ONE_THREAD, separate_randomness():
            self.kl_weight_ = self._chosen_kl_weight(seed, inputs, targets, weights, num_outputs)
            data = self._fit_guide(seed, inputs, targets, weights, num_outputs)
            if self.posterior_ == "mixture":
                self.guide_: StructuredGuide = self._fitted_mixture(self.guide_, data)
            self.draws_ = self._draws(data)
        return self

    def _fit_guide(
        self, seed: int, inputs: Array, targets: Array, weights: Array | None, num_outputs: int
    ) -> tuple[Tensor, ...]:
        """Fit the guide, or the points that chains and mixtures start at, and return scaled data."""
        torch.manual_seed(seed)
        self.x_scaler_ = scaler_of(inputs, weights)
        data = self._as_data(inputs, targets, weights)
        net = self._net(inputs, num_outputs).to(self.device)
        self.model_ = self._likelihood(bayesianize(net, prior=self._scale_of))
        self.guide_ = self._fitted_guide(data)
        are_starts = self._has_starts(data) and are_points(self.guide_.all_posteriors())
        if are_starts and self.prior_df is not None:
            self._learn_scales(net, self.prior_df, data)
        return data

    def _chosen_posterior(self, inputs: Array) -> str | Callable[..., StructuredGuide]:
        """Return the posterior; "auto" is what predicts best among those whose cost is bearable."""
        if self.posterior != "auto":
            return self.posterior
        is_large = self.refine == "auto" and not self._is_refined(inputs)
        return "mixture" if is_large else "ensemble"

    def _chosen_kl_weight(
        self, seed: int, inputs: Array, targets: Array, weights: Array | None, num_outputs: int
    ) -> float:
        """Return the weight of the KL, of a mixture by its predictions of held-out rows."""
        if self.kl_weight != "auto":
            return self.kl_weight
        if self.posterior_ != "mixture":
            return 1.0
        chosen, *smaller = self.kl_weights_of_mixture
        held_out = self._num_held_out(len(inputs))
        if held_out < self.fewest_compared or self._is_refined(inputs):
            return chosen
        order = np.random.RandomState(seed).permutation(len(inputs))
        held, rest = (
            [None if part is None else part[rows] for part in (inputs, targets, weights)]
            for rows in (order[:held_out], order[held_out:])
        )
        trial = copy(self).set_params(refine=False)  # whose rows may be few enough for chains
        vars(trial).pop("feature_names_in_", None)  # which its arrays do not have
        data = trial._fit_guide(check_random_state(seed).randint(2**31 - 1), *rest, num_outputs)
        points = trial.guide_
        _, y, *of_rows = trial._as_data(*held)

        def score(kl_weight: float) -> float:
            trial.kl_weight_ = kl_weight
            with separate_randomness():  # the same draws for each weight
                trial.guide_ = trial._fitted_mixture(points, data)
                trial.draws_ = trial._draws(data)
            found = torch.cat([each.log_density for each in trial._predictions(held[0], y)])
            return float((found @ of_rows[0]) if of_rows else found.sum())

        best = score(chosen)
        for kl_weight in smaller:
            found = score(kl_weight)
            if not found > best:
                break
            chosen, best = kl_weight, found
        return chosen

    def _num_held_out(self, num_data: int) -> int:
        """Return the number of held-out rows; a few of them would decide by chance."""
        fewest = min(FEWEST_HELD_OUT, num_data // 5) if self.validation_fraction else 0
        return max(fewest, int(self.validation_fraction * num_data))

    def _scale_of(self, name: str, value: Tensor) -> float:
        """Return the standard deviation of the normal prior of a parameter."""
        inputs = value.shape[1] if name in OF_INPUTS else 1
        return self.prior_scale * math.sqrt(min(1.0, MANY_INPUTS / inputs))

    def _net(self, inputs: Array, num_outputs: int) -> nn.Module:
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
        num_inputs = inputs.shape[1]
        sizes = [num_inputs, *map(int, hidden)]
        linear = partial(nn.Linear, dtype=getattr(torch, self.dtype))  # of random starts, too
        layers: list[nn.Module] = []
        for size, next_size in pairwise(sizes):
            layers += [linear(size, next_size), ACTIVATIONS[self.activation]()]
        net = nn.Sequential(*layers, linear(sizes[-1], num_outputs))
        has_skip = self.skip
        if self.skip == "auto":  # without hidden layers the net is itself a linear map
            has_skip = bool(hidden) and num_inputs <= num_distinct(inputs)
        return WithSkip(net, linear(num_inputs, num_outputs, bias=False)) if has_skip else net

    def _likelihood(self, net: nn.Module) -> Likelihood:
        raise NotImplementedError

    def _is_refined(self, inputs: Array | Tensor) -> bool:
        return len(inputs) <= REFINED if self.refine == "auto" else self.refine

    def _has_starts(self, data: tuple[Tensor, ...]) -> bool:
        """Whether points are starts of chains or of a mixture."""
        return self.posterior_ == "mixture" or self._is_refined(data[0])

    def _guide(self) -> StructuredGuide:
        ensemble = partial(guides.EnsembleGuide, size=self.num_members)
        make: dict[str, Callable[..., StructuredGuide]] = {
            "ensemble": ensemble,
            "mixture": ensemble,  # of the points that it starts at
            **POSTERIORS,
        }
        if not callable(self.posterior_) and self.posterior_ not in make:
            raise ValueError(
                f"`posterior` must be one of {['auto', *make]} or a function from a model to a guide, "
                f"but got {self.posterior!r}."
            )
        own = self.posterior_ if callable(self.posterior_) else make[self.posterior_]
        guide = own(self.model_)
        if not isinstance(guide, StructuredGuide):
            raise TypeError(
                f"`posterior` must return a guide of this package, but returned {brief(guide)}. Pass "
                "`posterior=KTiedGuide` or another one's class, or a function that makes one."
            )
        return guide

    def _fitted_mixture(self, points: StructuredGuide, data: tuple[Tensor, ...]) -> StructuredGuide:
        make, size = guides.MeanFieldGuide, self.num_members
        mixture = guides.MixtureGuide(self.model_, make, size, starts=points)
        with warnings.catch_warnings():
            # A prior that learns the scale of a layer has no closed form, and its draws vary little.
            warnings.simplefilter("ignore", SampledKLWarning)
            self._train(mixture, data, kl_weight=self.kl_weight_)
        return mixture

    def _fitted_guide(self, data: tuple[Tensor, ...]) -> StructuredGuide:
        guide, num_data = self._guide(), len(data[0])
        options: dict[str, Any] = {}
        held_out = self._num_held_out(num_data)
        if not are_points(guide.all_posteriors()):
            options["kl_weight"] = self.kl_weight_
        elif held_out and not self._has_starts(data):
            # Points that fit every example learn a noise of nearly nothing.
            order = torch.randperm(num_data, device=data[0].device)
            other = tuple(part[order[:held_out]] for part in data)
            data = tuple(part[order[held_out:]] for part in data)
            metric = partial(_weighted_log_density, other[2]) if len(other) > 2 else None
            held = other[0], other[1]
            options["validation"] = Validation(held, metric, every=10, patience=30)
        with warnings.catch_warnings():
            if self._has_starts(data):  # chains and mixtures widen the noise again
                warnings.simplefilter("ignore", VanishingNoiseWarning)
            self._train(guide, data, **options)
        return guide

    def _train(self, guide: StructuredGuide, data: tuple[Tensor, ...], **options: Any) -> None:
        history = fit(
            *(self.model_, guide, data),
            num_steps=self.num_steps,
            batch_size=self.batch_size if self.batch_size < len(data[0]) else None,
            compiled="traced",  # its numbers do not depend on measured times
            progress=self.progress,
            **options,
        )
        if history.interrupted:  # a search would score what there is
            raise KeyboardInterrupt

    def _learn_scales(self, net: nn.Module, df: float, data: tuple[Tensor, ...]) -> None:
        """Replace the prior of the model and of its points by one that learns the scales of layers.

        Chains learn the scales of inputs, too, which normals around points do not find. The density is
        highest where whole layers are zero, so points are found under normals.
        """
        points, is_refined = self.guide_.state_dict(), self._is_refined(data[0])

        def prior(name: str, value: Tensor) -> IsotropicStudentT:
            scale = self._scale_of(name, value)
            if name in OF_HIDDEN_INPUTS and is_refined:  # many inputs may be of no use
                return IsotropicStudentT(1.0, value.new_tensor(scale / 10), value.shape, dim=1)
            return IsotropicStudentT(df, value.new_tensor(scale / 2), value.shape)

        self.model_ = self._likelihood(bayesianize(net, prior))
        self.model_.num_data = len(data[0])
        self.guide_ = self._guide()
        self.guide_.initialize(*data)
        self.guide_.load_state_dict(points)

    @torch.no_grad()
    def _draws(self, data: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return draws of the posterior by site, from chains or from the guide."""
        guide = self.guide_
        if self._is_refined(data[0]):
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

    def _as_data(self, inputs: Array, targets: Array, weights: Array | None) -> tuple[Tensor, ...]:
        """Return scaled inputs, targets, and weights if there are any."""
        scaled = self.x_scaler_.transform(inputs)
        x = torch.as_tensor(scaled, dtype=getattr(torch, self.dtype), device=self.device)
        y = torch.as_tensor(targets, device=self.device)
        if y.is_floating_point():
            y = y.to(x.dtype).unsqueeze(-1)
        return (x, y) if weights is None else (x, y, torch.as_tensor(weights).to(x))

    @property
    def _num_draws(self) -> int:
        return len(next(iter(self.draws_.values())))

    def _predictions(
        self, X: ArrayLike, y: Tensor | None = None, draws: dict[str, Tensor] | None = None
    ) -> Iterator[Prediction]:
        """Yield predictions of some rows at a time, so that memory does not grow with their number."""
        check_is_fitted(self)
        rows = validate_data(self, X, dtype=np.float64, order="C", reset=False)
        draws = self.draws_ if draws is None else draws
        like = next(iter(draws.values()))  # of the fit, whatever `set_params` has said since
        inputs = torch.as_tensor(self.x_scaler_.transform(rows)).to(like)
        if y is not None and y.is_floating_point():
            y = y.to(like)
        size = max(1, FUNCTIONS_AT_A_TIME // len(like))
        for rows in torch.arange(len(inputs)).split(size):
            own = None if y is None else y[rows]
            yield predict(self.model_, draws, inputs[rows], y=own)


def all_or_nothing(fit: F) -> F:
    """Let a method that fails leave its estimator as it was, with scales and draws of one fit."""

    @wraps(fit)
    def restoring(self: BayesianMLP, *args: Any, **kwargs: Any) -> Any:
        before = vars(self).copy()
        try:
            return fit(self, *args, **kwargs)
        except BaseException:
            self.__dict__ = before
            raise

    return restoring  # type: ignore[return-value]


def _weighted_log_density(weights: Tensor, prediction: Prediction, y: Tensor) -> float:
    assert prediction.log_density is not None
    return float(weights @ prediction.log_density / weights.sum())


def scaler_of(columns: Array, weights: Array | None) -> StandardScaler:
    """Return the scaling of columns, to arrays whatever scikit-learn's ``transform_output`` is."""
    if weights is not None:  # a column counts as constant by the sum of weights, too
        weights = weights / weights.mean()
    return StandardScaler().set_output(transform="default").fit(columns, sample_weight=weights)


def num_distinct(rows: Array) -> int:
    """Return the number of distinct rows, the same whether an example is repeated or has a weight."""
    return len(np.unique(rows, axis=0))


def to_numpy(values: Tensor | None) -> Array:
    """Return values in double precision."""
    assert values is not None
    return values.detach().double().cpu().numpy()


def as_weights(sample_weight: ArrayLike | None, inputs: Array) -> Array | None:
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


def with_weight(
    inputs: Array, targets: Array, weights: Array | None
) -> tuple[Array, Array, Array | None]:
    """Return the examples of positive weight."""
    if weights is None:
        return inputs, targets, None
    return inputs[weights > 0], targets[weights > 0], weights[weights > 0]
