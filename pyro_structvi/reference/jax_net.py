"""The forward pass of a net as a function of JAX arrays, by symbolic tracing."""

import inspect
import operator
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, fx, nn

from pyro_structvi._pyro import site_values


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return x @ weight.T if bias is None else x @ weight.T + bias


def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = start_dim % x.ndim, end_dim % x.ndim
    return x.reshape(*x.shape[:first], -1, *x.shape[last + 1 :])


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    return jnp.where(beta * x > threshold, x, jax.nn.softplus(beta * x) / beta)


def _squeeze(x: Any, dim: int | tuple[int, ...]) -> Any:
    dims = dim if isinstance(dim, tuple) else (dim,)
    return jnp.squeeze(x, tuple(each for each in dims if x.shape[each] == 1))


def _getitem(x: Any, index: Any) -> Any:
    """Index by numbers and slices before lists and arrays, as torch; NumPy takes numbers as arrays."""
    if isinstance(x, (tuple, Mapping)):  # a shape, or the sites
        return x[index]
    parts = index if isinstance(index, tuple) else (index,)
    # JAX refuses lists, and masks that it has converted under `jit`.
    parts = tuple(np.asarray(part) if isinstance(part, list) else part for part in parts)
    everything, first, then = slice(None), [], []
    for part in parts:
        is_array = np.ndim(part) > 0
        is_mask = is_array and part.dtype == bool
        first += [everything] * (part.ndim if is_mask else 1) if is_array else [part]
        if is_array or part is Ellipsis:
            then.append(part)
        elif part is None or isinstance(part, slice):
            then.append(everything)
    return x[tuple(first)][tuple(then)]


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda x, other, inplace=True: function(x, other)


_AUGMENTED = ("add", "mul", "pow", "sub", "truediv")  # as in `h += 1`

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
    "getitem": _getitem,
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
    **{f"i{name}": _in_place(getattr(operator, name)) for name in _AUGMENTED},
}
_TENSOR_ATTRIBUTES = ("shape", "T", "mT")


def to_array(tensor: Tensor) -> Any:
    """Return a tensor as a NumPy array, in float64 if it is floating point."""
    tensor = tensor.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


_VIEWS = ("flatten", "getattr", "getitem", "reshape", "squeeze", "unsqueeze", "view")


class JaxNet:
    """The forward pass of a torch net on JAX arrays.

    The net is traced once with :mod:`torch.fx`; each call runs the recorded functions in JAX.
    ``site_names`` has all its sites, ``sites`` the sites of the forward pass, and ``output`` is the
    likelihood's.

    Raises:
        NotImplementedError: If a function of the net has no translation, or the net cannot be traced.
    """

    def __init__(self, net: nn.Module, site_names: list[str], output: Any = None) -> None:
        for path, module in net.named_modules(prefix="net"):
            names = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
            if names:
                raise NotImplementedError(
                    f"The net's module {_describe(path, module)} has point estimates, {names}, and a "
                    "sampler draws from a posterior of everything that is unknown. Make each a site "
                    "with `bayesianize`, or freeze it with `requires_grad_(False)`."
                )
        root = _Root(net, site_names, output)
        state = torch.get_rng_state()
        with _NoSites(), torch.no_grad():
            graph = _Tracer().trace(root)
        if not torch.equal(state, torch.get_rng_state()):
            torch.set_rng_state(state)
            raise _untranslatable("The net draws random numbers inside a forward pass")
        self._inputs = _, sites = [*graph.find_nodes(op="placeholder")]
        for node in [node for node in sites.users if not node.users]:
            graph.erase_node(node)
        self.sites = {node.args[1] for node in sites.users}
        numbers = _numbers_of(graph)
        self._constants: dict[fx.Node, Any] = {}
        self._calls: list[tuple[fx.Node, Callable[..., Any], inspect.BoundArguments]] = []
        for node in graph.nodes:
            if node.op == "get_attr":
                self._constants[node] = to_array(operator.attrgetter(node.target)(root))
            elif node.op == "output":
                self._output = node.args[0]
            elif node.op != "placeholder":
                function, call = _translated(node, root)
                self._calls.append((node, function, call))
                if node in numbers:
                    call.arguments.pop("inplace", None)
                elif call.arguments.get("inplace") or _name(node.target) == "dropout":
                    node.replace_all_uses_with(node.args[0])  # the same tensor
        _check_memory(graph, {node: call for node, _, call in self._calls})

    def __call__(self, x: Any, sites: Mapping[str, Any]) -> Any:
        """Return the output ``(batch, ...)`` for an input ``(batch, ...)`` and values by site."""
        values = {**self._constants, **dict(zip(self._inputs, (x, sites), strict=True))}
        for node, function, call in self._calls:
            args, kwargs = fx.node.map_arg((call.args, call.kwargs), values.__getitem__)
            values[node] = function(*args, **kwargs)
            if call.arguments.get("inplace"):
                values[node.args[0]] = values[node]
        return fx.node.map_arg(self._output, values.__getitem__)


class _Root(nn.Module):
    """Calls a net with given values of its sites, and reads its output."""

    def __init__(self, net: Any, site_names: list[str], output: Any) -> None:
        super().__init__()
        self.net, self.site_names, self.output = net, site_names, output

    def forward(self, x: Any, sites: Any) -> Any:
        context: Any = site_values(self.net) if self.site_names else nullcontext({})
        with context as values:
            values.update({name: sites[name] for name in self.site_names})
            result = self.net(x)
            if self.output is not None:
                return self.output(result)
            # A traced tensor seems to have any attribute.
            return result if isinstance(result, fx.Proxy) else getattr(result, "logits", result)


class _NoSites(Messenger):
    """Refuses sample statements."""

    def _pyro_sample(self, msg: Any) -> None:
        raise _untranslatable(f"The net draws the site '{msg['name']}' inside a forward pass")


class _Proxy(fx.Proxy):
    """Records augmented assignments, which change the memory of a tensor.

    Without them Python would take ``h += 1`` for ``h = h + 1``.
    """


def _recorded(function: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda own, other: own.tracer.create_proxy("call_function", function, (own, other), {})


for _own in _AUGMENTED:
    setattr(_Proxy, f"__i{_own}__", _recorded(getattr(operator, f"i{_own}")))


class _Tracer(fx.Tracer):
    """Traces into every module; errors name the module."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except NotImplementedError:
            raise
        except Exception as error:
            raise _untranslatable(
                f"The forward pass of the net's module {_describe(self.path_of_module(m), m)} cannot be "
                f"traced ({error})"
            ) from error

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False  # the functions are translated, not the modules


def _translated(node: fx.Node, root: _Root) -> tuple[Callable[..., Any], inspect.BoundArguments]:
    """Return the function of JAX for a call, and its arguments; raise if it has no translation."""
    path = list(node.meta.get("nn_module_stack", {"net": ("net",)}).values())[-1][0]
    where = f"in the forward pass of the net's module {_describe(path, root.get_submodule(path))}"
    name = _name(node.target)
    if name not in _FUNCTIONS:
        raise _untranslatable(f"The function `{name}` {where} has no translation to NumPyro")
    function = _FUNCTIONS[name]
    try:
        call = inspect.signature(function).bind(*node.args, **node.kwargs)
    except TypeError as error:
        raise _untranslatable(
            f"The function `{name}` {where} has arguments without a translation to NumPyro "
            f"({error})"
        ) from error
    call.apply_defaults()
    if name == "getattr" and call.arguments["name"] not in _TENSOR_ATTRIBUTES:
        raise _untranslatable(
            f"The attribute `{call.arguments['name']}` of a tensor {where} has no translation to "
            "NumPyro"
        )
    if name == "dropout" and call.arguments["training"] and call.arguments["p"] > 0:
        raise NotImplementedError(
            f"Dropout {where} is active, so the net is no fixed function of its weights. Call "
            "`model.eval()` first, or leave dropout out."
        )
    return function, call


def _numbers_of(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values are shapes, or computed from shapes only."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_shape = _name(node.target) == "size" or node.args[1:] == ("shape",)
        if is_shape or (node.all_input_nodes and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _check_memory(graph: fx.Graph, calls: Mapping[fx.Node, inspect.BoundArguments]) -> None:
    """Raise if a tensor is read after its memory was changed in place by way of another tensor."""
    bases: dict[Any, Any] = {}  # tensors whose memory is that of others
    stale: set[Any] = set()

    def base_of(value: Any) -> Any:
        return base_of(bases[value]) if value in bases else value

    for node in graph.nodes:
        name, arguments = _name(node.target), calls[node].arguments if node in calls else {}
        if name == "size" or arguments.get("name") == "shape":  # no memory is read
            continue
        if stale.intersection(node.all_input_nodes):
            raise _untranslatable(
                f"A tensor is read by `{name}` after a view of it, or the tensor that it is a view of, "
                "was changed in place"
            )
        changes = arguments.get("inplace") and name != "dropout"
        if changes or name in _VIEWS:
            bases[node] = first = node.args[0]
            others = {*bases, *bases.values()} - {first, node} if changes else set()
            stale |= {each for each in others if base_of(each) is base_of(first)}


def _name(target: Any) -> str:
    """Return the name of a method, or of a function, with its module unless that is torch's."""
    if isinstance(target, str):
        return target
    origin = (target.__module__ or "torch").split(".")[0]
    known = origin in ("torch", "_operator", "builtins")
    return str(target.__name__) if known else f"{target.__module__}.{target.__name__}"


def _describe(path: str, module: nn.Module) -> str:
    return f"'{path}' ({type(module).__name__.removeprefix('Pyro')})"


def _untranslatable(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what}. Supported are modules whose forward pass calls the functions "
        f"{', '.join(sorted(_FUNCTIONS))}, as linear layers and common activations do, without control "
        "flow on values. Sample another net with `pyro.infer.NUTS`."
    )
