"""The forward pass of a net as a function of JAX arrays, by symbolic tracing."""

import inspect
import operator
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import torch
from pyro.nn import PyroModule
from pyro.poutine.messenger import Messenger
from torch import Tensor, fx, nn

from pyro_structvi._pyro import declared_name, plain_class, site_name, site_values
from pyro_structvi.nn.likelihood import BinaryClassifier, Classifier, Likelihood
from pyro_structvi.nn.regressors import SMALLEST_SCALE, PoissonRegressor, Regressor

_LAYERS = (nn.Linear, nn.Flatten, nn.Identity, nn.Dropout)
_ACTIVATIONS = (
    *(nn.ELU, nn.GELU, nn.LeakyReLU, nn.ReLU),
    *(nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Tanh),
)
_CONTAINERS = (nn.Sequential, nn.Module)


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return x @ weight.T if bias is None else x @ weight.T + bias


def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = start_dim % x.ndim, end_dim % x.ndim
    return x.reshape(*x.shape[:first], -1, *x.shape[last + 1 :])


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    return jnp.where(beta * x > threshold, x, jax.nn.softplus(beta * x) / beta)


def _squeeze(x: Any, dim: int) -> Any:
    return jnp.squeeze(x, dim) if x.shape[dim] == 1 else x


# Names and arguments as in torch; a name serves functions, methods and operators.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "cat": lambda tensors, dim=0: jnp.concatenate(tensors, dim),
    "div": operator.truediv,
    "dropout": lambda x, p=0.5, training=True, inplace=False: x,
    "elu": lambda x, alpha=1.0, inplace=False: jax.nn.elu(x, alpha),
    "exp": jnp.exp,
    "flatten": _flatten,
    "gelu": lambda x, approximate="none": jax.nn.gelu(x, approximate == "tanh"),
    "getattr": lambda x, name: getattr(x, name),  # has a signature, unlike the builtin
    "getitem": operator.getitem,
    "leaky_relu": lambda x, negative_slope=0.01, inplace=False: jax.nn.leaky_relu(
        x, negative_slope
    ),
    "linear": _linear,
    "matmul": operator.matmul,
    "mul": operator.mul,
    "neg": operator.neg,
    "pow": operator.pow,
    "relu": lambda x, inplace=False: jax.nn.relu(x),
    "reshape": lambda x, *shape: x.reshape(*shape),
    "sigmoid": jax.nn.sigmoid,
    "silu": lambda x, inplace=False: jax.nn.silu(x),
    "sin": jnp.sin,
    "size": lambda x, dim=None: x.shape if dim is None else x.shape[dim],
    "softplus": _softplus,
    "squeeze": _squeeze,
    "sub": operator.sub,
    "tanh": jnp.tanh,
    "truediv": operator.truediv,
    "unsqueeze": jnp.expand_dims,
    "view": lambda x, *shape: x.reshape(*shape),
}
_TENSOR_ATTRIBUTES = ("shape", "T", "mT")


def to_array(tensor: Tensor) -> Any:
    """Return a tensor as a NumPy array, in float64 if it is floating point."""
    tensor = tensor.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


# A module, its attribute, and the name of the attribute's site, which tied weights share.
SiteAttribute = tuple[PyroModule, str, str]


class JaxNet:
    """The forward pass of a torch net on JAX arrays.

    The net is traced once with :mod:`torch.fx`; each call runs the recorded functions in JAX. ``sites``
    are the names of the sites that the forward pass uses.

    Raises:
        NotImplementedError: If a layer or a function of the net has no translation, or the net cannot be
            traced.
    """

    def __init__(self, net: nn.Module, site_attributes: list[SiteAttribute]) -> None:
        for path, module in net.named_modules(prefix="net"):
            names = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
            if names:
                raise NotImplementedError(
                    f"The net's module {_describe(path, module)} has point estimates, {names}, and a "
                    "sampler draws from a posterior of everything that is unknown. Make each a site "
                    "with `bayesianize`, or freeze it with `requires_grad_(False)`."
                )
        root = _Root(net, site_attributes)
        with _NoSites(), torch.no_grad():
            self._graph = _Tracer().trace(root)
        inputs, sites = list(self._graph.find_nodes(op="placeholder"))
        for node in [node for node in sites.users if not node.users]:
            self._graph.erase_node(node)
        self.sites = {node.args[1] for node in sites.users}
        self._inputs = (inputs, sites)
        self._constants = {}
        for node in self._graph.nodes:
            if node.op == "get_attr":
                self._constants[node] = to_array(operator.attrgetter(node.target)(root))
            elif node.op in ("call_function", "call_method"):
                _check_call(node, root)

    def __call__(self, x: Any, sites: Mapping[str, Any]) -> Any:
        """Return the output ``(batch, ...)`` for an input ``(batch, ...)`` and values by site."""
        values: dict[fx.Node, Any] = dict(zip(self._inputs, (x, sites), strict=True))
        values.update(self._constants)
        for node in self._graph.nodes:
            if node.op == "output":
                return fx.node.map_arg(node.args[0], values.__getitem__)
            if node.op not in ("call_function", "call_method"):
                continue
            call = _bind(node)
            arguments = fx.node.map_arg((call.args, call.kwargs), values.__getitem__)
            values[node] = _FUNCTIONS[_name(node)](*arguments[0], **arguments[1])
            if call.arguments.get("inplace"):
                values[node.args[0]] = values[node]
        raise AssertionError("a graph ends with its output")


class _Root(nn.Module):
    """Calls a net with given values of its sites."""

    def __init__(self, net: nn.Module, site_attributes: list[SiteAttribute]) -> None:
        super().__init__()
        self.net = net
        self.site_attributes = site_attributes

    def forward(self, x: Any, sites: Any) -> Any:
        """Return the net's output."""
        with ExitStack() as stack:
            for module, attribute, site in self.site_attributes:
                values = stack.enter_context(site_values(module))
                values[site_name(module, attribute)] = sites[site]
            return self.net(x)


class _NoSites(Messenger):
    """Refuses sample statements."""

    def _pyro_sample(self, msg: Any) -> None:
        raise _untranslatable(f"The net draws the site '{msg['name']}' inside a forward pass")


class _Tracer(fx.Tracer):
    """Traces into every module; errors name the module."""

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Trace a call of a supported module."""
        where = _describe(self.path_of_module(m), m)
        bases = plain_class(m).__mro__
        kind = next(base for base in bases if base.__module__.startswith("torch.nn."))
        if kind not in (*_LAYERS, *_ACTIVATIONS, *_CONTAINERS):
            raise _untranslatable(f"The net's module {where} has no translation to NumPyro")
        try:
            return super().call_module(m, forward, args, kwargs)
        except NotImplementedError:
            raise
        except Exception as error:
            raise _untranslatable(
                f"The forward pass of the net's module {where} cannot be traced ({error})"
            ) from error

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return False: the functions are translated, not the modules."""
        return False


def _check_call(node: fx.Node, root: _Root) -> None:
    """Raise a ``NotImplementedError`` unless a call and its arguments have a translation."""
    path = list(node.meta.get("nn_module_stack", {"net": ("net",)}).values())[-1][0]
    where = f"in the forward pass of the net's module {_describe(path, root.get_submodule(path))}"
    name = _name(node)
    if name not in _FUNCTIONS:
        raise _untranslatable(f"The function `{name}` {where} has no translation to NumPyro")
    try:
        arguments = _bind(node).arguments
    except TypeError as error:
        raise _untranslatable(
            f"The function `{name}` {where} has arguments without a translation to NumPyro "
            f"({error})"
        ) from error
    if name == "getattr" and arguments["name"] not in _TENSOR_ATTRIBUTES:
        raise _untranslatable(
            f"The attribute `{arguments['name']}` of a tensor {where} has no translation to NumPyro"
        )
    if name == "dropout" and arguments["training"] and arguments["p"] > 0:
        raise NotImplementedError(
            f"Dropout {where} is active, so the net is no fixed function of its weights. Call "
            "`model.eval()` first, or leave dropout out."
        )


def _name(node: fx.Node) -> str:
    """Return the name of a node's function."""
    target: Any = node.target
    if isinstance(target, str):
        return target
    origin = (target.__module__ or "torch").split(".")[0]
    known = origin in ("torch", "_operator", "builtins")
    return str(target.__name__) if known else f"{target.__module__}.{target.__name__}"


def _bind(node: fx.Node) -> inspect.BoundArguments:
    bound = inspect.signature(_FUNCTIONS[_name(node)]).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound


def _describe(path: str, module: nn.Module) -> str:
    return f"'{path}' ({type(module).__name__.removeprefix('Pyro')})"


def _untranslatable(what: str) -> NotImplementedError:
    modules = sorted(kind.__name__ for kind in (*_LAYERS, *_ACTIVATIONS, *_CONTAINERS[:1]))
    return NotImplementedError(
        f"{what}. Supported are the modules {', '.join(modules)}, and modules whose forward pass calls "
        f"these or the functions {', '.join(sorted(_FUNCTIONS))}, without control flow on values. "
        "Sample another net with `pyro.infer.NUTS`."
    )


# From the net's output and values by site to the distribution of the observations.
JaxLikelihood = Callable[[Any, dict[str, Any]], Any]


def to_jax_likelihood(model: Any) -> tuple[JaxLikelihood, set[str]]:
    """Return a model's likelihood in NumPyro, and its latent sites.

    Raises:
        TypeError: If the model is of another kind.
        NotImplementedError: If it standardizes its data or weighs classes.
    """
    kinds: tuple[type[Likelihood], ...] = (*_FIXED, Regressor)
    if not isinstance(model, kinds):
        raise TypeError(
            f"`model` must be a {', '.join(kind.__name__ for kind in _FIXED)} or Regressor, but got "
            f"{type(model).__name__}. Write `Regressor(bayesianize(net), num_data, noise_scale)`."
        )
    if model.input_mean is not None:
        raise NotImplementedError(
            "`standardize` must be None for a model in NumPyro. Standardize the data themselves."
        )
    if isinstance(model, Regressor):
        return _targets(model)
    if isinstance(model, Classifier) and model.class_weights is not None:
        raise NotImplementedError(
            "`class_weights` must be None for a model in NumPyro; leave it out."
        )
    return next(make for kind, make in _FIXED.items() if isinstance(model, kind)), set()


def _targets(model: Regressor) -> tuple[JaxLikelihood, set[str]]:
    def noise(mean: Any, scale: Any) -> Any:
        is_normal = model.df is None
        return _over_targets(
            dist.Normal(mean, scale) if is_normal else dist.StudentT(model.df, mean, scale)
        )

    def heteroscedastic(output: Any, sites: dict[str, Any]) -> Any:
        mean, raw = jnp.split(output, 2, -1)
        return noise(mean, jnp.maximum(jax.nn.softplus(raw), SMALLEST_SCALE))

    if model.is_heteroscedastic:
        return heteroscedastic, set()
    buffer = dict(model.named_buffers(recurse=False)).get("noise_scale")
    if buffer is None:
        name = declared_name(model, "noise_scale")
        return lambda mean, sites: noise(mean, sites[name]), {name}
    value = to_array(buffer)
    return lambda mean, sites: noise(mean, jnp.asarray(value)), set()


def _over_targets(distribution: Any) -> Any:
    return distribution.to_event(len(distribution.batch_shape) - 1)


# Likelihoods without sites.
_FIXED: dict[type[Likelihood], JaxLikelihood] = {
    Classifier: lambda logits, sites: dist.Categorical(logits=logits),
    BinaryClassifier: lambda logits, sites: _over_targets(dist.Bernoulli(logits=logits)),
    PoissonRegressor: lambda logs, sites: _over_targets(dist.Poisson(jnp.exp(logs))),
}
