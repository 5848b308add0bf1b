"""Posteriors over weights as models of BoTorch."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

try:
    from botorch.models.deterministic import GenericDeterministicModel
    from botorch.models.ensemble import EnsembleModel
    from botorch.models.transforms.input import InputTransform
    from botorch.models.transforms.outcome import OutcomeTransform
except ImportError as error:
    raise ImportError('BoTorch is needed: `pip install "pyro-structvi[botorch]"`.') from error

from pyro_structvi._checks import Count, Positive, Program, check_shape, checked, shape_text
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.infer import fit
from pyro_structvi.posterior import predict
from pyro_structvi.posterior.passes import count_draws, spaced
from pyro_structvi.sites.site_posterior import stack_draws
from pyro_structvi.structures.mixture import weights_of

__all__ = ["StructuredModel"]

DEFAULT_DRAWS = 128  # of a guide that is no ensemble of points


class StructuredModel(EnsembleModel):
    r"""A fitted posterior as a model of BoTorch, for acquisition functions by Monte Carlo.

    The posterior at X is a set of S functions, one for each draw of all weights: joint over all inputs,
    and the same in each call. Samples are differentiable in X. A guide is sampled once, on its device.
    The functions have no noise: ``observation_noise=True`` changes nothing, as for BoTorch's ensembles.
    They are what the model returns, such as log rates of a :class:`~pyro_structvi.PoissonRegressor`, and
    ``best_f`` must be in these units.

    Args:
        model: The model, such as a :class:`~pyro_structvi.Regressor` of the mean of outcomes ``(n, m)``.
            Its argument ``standardize=(x, y)`` scales inputs and outcomes.
        posterior: The fitted guide, or draws by site ``(draws, *shape)``, such as the result of
            :func:`~pyro_structvi.reference.mclmc`.
        data: The inputs ``(n, d)`` and outcomes ``(n, m)``, before any transform of BoTorch's.
        num_draws: The number S of draws, evenly spaced ones if they are given. When None, all given
            draws, each member once of an ensemble of points, and 128 draws of other guides.
        input_transform: BoTorch's transform of inputs, if the guide was fitted to transformed inputs.
        outcome_transform: Likewise for outcomes; it has seen the outcomes of the fit. Functions are
            transformed back.

    Attributes:
        draws: The draws, ``(S, *shape)`` by site.

    Raises:
        ValueError: If the lengths of the data differ, or fewer draws than ``num_draws`` are given.

    Example:
        >>> from botorch.acquisition import qLogExpectedImprovement
        >>> from pyro_structvi import MatrixNormalGuide, Regressor, bayesianize, fit
        >>> x = torch.rand(20, 2, dtype=torch.double)
        >>> y = (x - 0.5).square().sum(-1, keepdim=True).neg()
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
        >>> regressor = Regressor(bayesianize(net.double()), noise="learned", standardize=(x, y))
        >>> guide = MatrixNormalGuide(regressor)
        >>> history = fit(regressor, guide, (x, y), num_steps=100, progress=False)
        >>> model = StructuredModel(regressor, guide, (x, y))
        >>> model.posterior(torch.rand(5, 3, 2, dtype=torch.double)).rsample(torch.Size([8])).shape
        torch.Size([8, 5, 3, 1])
        >>> improvement = qLogExpectedImprovement(model, best_f=y.max())
        >>> improvement(torch.rand(4, 2, 2, dtype=torch.double)).shape
        torch.Size([4])

    References:
        Li, Rudner and Wilson (2024), "A study of Bayesian neural network surrogates for Bayesian
        optimization".
    """

    @checked
    def __init__(
        self,
        model: Program,
        posterior: StructuredGuide | Mapping[str, Tensor],
        data: tuple[Tensor, Tensor],
        num_draws: Count | None = None,
        *,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> None:
        x, y = data
        if y.dim() != 2 or x.dim() != 2:
            raise ValueError(
                "`data` must hold inputs (n, d) and outcomes (n, m), but got shapes "
                f"{tuple(x.shape)} and {tuple(y.shape)}. Write `y.unsqueeze(-1)` for one outcome."
            )
        check_shape("data[1]", y, (len(x), y.shape[-1]), "that of the inputs")
        draws, weights = _draws_of(posterior, num_draws)
        super().__init__(weights)
        # A copy of a guide is made of a copied model only if that is copied before.
        self.model, self.data = model, (x, y)
        self.guide = None if isinstance(posterior, Mapping) else posterior
        self.train_inputs = (x,)
        self._num_outputs = y.shape[-1]
        self.draws = {name: each.detach() for name, each in draws.items()}
        self.num_draws = len(next(iter(self.draws.values())))
        self._given_draws = num_draws
        if input_transform is not None:
            self.input_transform = input_transform
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        self.eval()  # in training a transform of BoTorch learns its constants anew

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape of the model, which has none."""
        return torch.Size([])

    def set_train_data(self, inputs: Tensor, strict: bool = True) -> None:
        """Set the inputs that BoTorch transforms in evaluation mode; the posterior has its own data."""
        self.train_inputs = (inputs,)

    def _apply(self, fn: Any, recurse: bool = True) -> "StructuredModel":
        """Move draws and data with the parameters, as for ``to`` and ``float``."""
        super()._apply(fn, recurse)
        self.draws = {name: fn(each) for name, each in self.draws.items()}
        self.data = fn(self.data[0]), fn(self.data[1])
        self.train_inputs = (fn(self.train_inputs[0]),)
        if self.ensemble_weights is not None:
            self.ensemble_weights = fn(self.ensemble_weights)
        return self

    def forward(self, X: Tensor) -> Tensor:
        """Return the functions at transformed inputs ``(*batch, q, d)``: ``(*batch, S, q, m)``."""
        functions = self._functions_at(self.draws, X)
        return functions.movedim(0, -3)

    def _functions_at(self, draws: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return functions ``(S, *batch, q, m)``."""
        rows, size = x.reshape(-1, x.shape[-1]), self._num_outputs
        if not len(rows):
            count = len(next(iter(draws.values())))
            return x.sum(-1, keepdim=True).expand(count, *x.shape[:-1], size)  # of no element
        found = predict(self.model, draws, rows, differentiable=torch.is_grad_enabled())
        functions = found.functions
        assert functions is not None
        if functions.shape[2:] != (size,) and (functions.dim() > 2 or size > 1):
            raise ValueError(
                f"`model` must return means of {size} outcomes, those of `data`, (n, {size}), but its "
                f"outputs are {shape_text(functions.shape[1:])} for {len(rows)} inputs. Pass a "
                "`Regressor` and all outcomes that it was fitted to."
            )
        return functions.reshape(-1, *x.shape[:-1], size)

    @checked
    def sample(self, number: int | None = None) -> GenericDeterministicModel:
        """Return one function as a deterministic model of BoTorch, for Thompson sampling.

        Args:
            number: The number of the draw; a random one when None, by the weights of an ensemble.

        Raises:
            ValueError: If there is no such draw.

        Example:
            >>> from botorch.acquisition import PosteriorMean
            >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
            >>> x, y = torch.rand(8, 2), torch.rand(8, 1)
            >>> regressor = Regressor(bayesianize(torch.nn.Linear(2, 1)), noise="learned")
            >>> model = StructuredModel(regressor, MeanFieldGuide(regressor), (x, y))
            >>> PosteriorMean(model.sample())(torch.rand(4, 1, 2)).shape
            torch.Size([4])
        """
        if number is None:
            weights = self.ensemble_weights
            weights = torch.ones(self.num_draws) if weights is None else weights
            number = int(weights.multinomial(1))
        if not 0 <= number < self.num_draws:
            raise ValueError(
                f"`number` must be from 0 to {self.num_draws - 1}, that of a draw, but got {number}."
            )
        draw = {name: draws[number : number + 1] for name, draws in self.draws.items()}

        def function(X: Tensor) -> Tensor:
            values = self._functions_at(draw, self.transform_inputs(X))[0]
            if hasattr(self, "outcome_transform"):
                values, _ = self.outcome_transform.untransform(values, X=X)
            return values

        return GenericDeterministicModel(function, num_outputs=self._num_outputs)

    @checked
    def condition_on_observations(
        self,
        X: Tensor,
        Y: Tensor,
        *,
        num_steps: Count = 300,
        lr: Positive = 0.03,
        **kwargs: Any,
    ) -> "StructuredModel":
        """Return a new model of all data, by a fit that starts at this posterior.

        Args:
            X: New inputs ``(n, d)``.
            Y: New outcomes ``(n, m)``.
            num_steps: Steps of :func:`~pyro_structvi.fit`, with all data in each.
            lr: Its learning rate.
            **kwargs: Further arguments of ``fit``.

        Raises:
            TypeError: If this is a model of draws, without a guide.
            ValueError: If shapes do not fit the data of this model.
        """
        if self.guide is None:
            raise TypeError(
                "A model of draws has no guide to fit to new data, so sample again and write "
                "`StructuredModel(model, draws, data)`."
            )
        x, y = self.data
        check_shape("X", X, (len(X), x.shape[-1]), "that of new inputs")
        check_shape("Y", Y, (len(X), y.shape[-1]), "that of new outcomes")
        data = torch.cat([x, X]), torch.cat([y, Y])
        inputs, outcomes = data
        if hasattr(self, "input_transform"):  # some transforms are for predictions alone
            inputs = self.input_transform.preprocess_transform(inputs)
        if hasattr(self, "outcome_transform"):
            outcomes, _ = self.outcome_transform(outcomes, X=data[0])
        model, guide = deepcopy((self.model, self.guide))
        if hasattr(model, "num_data"):
            model.num_data = len(data[0])
        options = {"kl_weight": 1.0, "progress": False, **kwargs}
        history = fit(model, guide, (inputs, outcomes), num_steps=num_steps, lr=lr, **options)
        if history.interrupted:  # a loop would go on with what there is
            raise KeyboardInterrupt
        return StructuredModel(
            model,
            guide,
            data,
            self._given_draws,
            input_transform=deepcopy(getattr(self, "input_transform", None)),
            outcome_transform=deepcopy(getattr(self, "outcome_transform", None)),
        )


def _draws_of(
    posterior: StructuredGuide | Mapping[str, Tensor], num_draws: int | None
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return draws by site, and their weights if they are the members of an ensemble of points."""
    if isinstance(posterior, Mapping):
        available = count_draws(posterior, None)
        if (num_draws or 0) > available:
            raise ValueError(
                f"`num_draws` must be at most the {available} given draws, but got {num_draws}."
            )
        chosen = spaced(available, num_draws or available)
        return {name: values[chosen] for name, values in posterior.items()}, None
    if posterior.is_of_points and num_draws is None:
        draws = stack_draws([member.draw() for member in posterior.members])
        return draws, weights_of(posterior).clone()
    return posterior.joint_posterior().draw_many(range(num_draws or DEFAULT_DRAWS)), None
