"""Private parts of Pyro, each with its use and with what breaks without it."""

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

from pyro.nn import PyroModule
from pyro.nn.module import _Context, _PyroModuleMeta
from pyro.optim import PyroOptim
from pyro.params import param_with_module_name
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.messenger import _bound_partial, _context_wrap
from pyro.poutine.reparam_messenger import ReparamHandler
from pyro.poutine.replay_messenger import ReplayMessenger
from pyro.poutine.runtime import _PYRO_PARAM_STORE, _PYRO_STACK
from pyro.poutine.trace_messenger import TraceHandler
from torch import Size, Tensor, nn
from torch.distributions import constraints

# ---- threads -----------------------------------------------------------------------------------------

# Pyro's stack of handlers and a net's values belong to the process, not to a thread. Two threads that
# run models at once would meet each other's handlers; with it one of them waits.
ONE_THREAD = threading.RLock()

# ---- plates ------------------------------------------------------------------------------------------

_FIRST: ContextVar[int] = ContextVar("first", default=0)
# The names of the plates by which Pyro draws several values of each site in one pass.
_OF_DRAWS = (
    "num_particles_vectorized",
    "num_sleep_particles_vectorized",
    "_num_predictive_samples",
)


def plates_around() -> Size:
    """Return the sizes of the vectorized plates around a model, except the plate of its data at dim -1.

    Pyro's objectives and ``Predictive`` put them there, and a net's layers take no such dimensions.
    """
    dims = {plate.dim: plate.size for plate in _vectorized_plates() if plate.dim < -1}
    return Size([dims.get(dim, 1) for dim in range(min(dims, default=-1), -1)])


def inside_plate() -> bool:
    """Whether a vectorized plate is around, so that each particle has a draw of the guide."""
    return bool(_vectorized_plates())


def users_plate_around() -> str | None:
    """Return the name of a vectorized plate around that is no plate of Pyro's draws, or None."""
    return next((each.name for each in _vectorized_plates() if each.name not in _OF_DRAWS), None)


def _vectorized_plates() -> list[Any]:
    plates = [each for each in handlers_around() if isinstance(each, IndepMessenger)]
    return [plate for plate in plates if plate.dim is not None]


def handlers_around() -> list[Any]:
    """Return the handlers in whose blocks this code runs."""
    return _PYRO_STACK[_FIRST.get() :]


def unwrapped(program: Any) -> Any:
    """Return the program inside of handlers and of ``functools.partial``.

    Pyro's own ``unwrap`` stops at ``poutine.reparam``, and takes an argument of a partial for a program.
    """
    while isinstance(program := without_handlers(program), partial):
        program = program.func
    return program


def without_handlers(program: Any) -> Any:
    """Return the program inside of Pyro's handlers, which may be a partial."""
    while True:
        if isinstance(program, (ReparamHandler, TraceHandler)):
            program = program.fn
        elif isinstance(program, partial) and program.func is _context_wrap:
            _, inner, *bound = program.args  # to an object, if a method has the handler
            program = MethodType(unwrapped(inner), *bound) if bound else inner
        else:
            return program


def under_innermost(program: Any, handler: Any) -> Any:
    """Return a program under its own handlers, with a further one inside of them all.

    It sees sites that ``poutine.block`` hides from handlers outside.
    """
    program = program.func if isinstance(program, _bound_partial) else program
    if isinstance(program, ReparamHandler):
        return ReparamHandler(program.msngr, under_innermost(program.fn, handler))
    if not isinstance(program, partial) or program.func is not _context_wrap:
        return handler(program)
    around, inner, *bound = program.args
    return partial(_context_wrap, around, under_innermost(inner, handler), *bound)


def is_given(name: str) -> bool:
    """Whether a handler around, such as ``poutine.replay``, gives a site its value."""
    traces = [each.trace for each in handlers_around() if isinstance(each, ReplayMessenger)]
    return any(name in known for known in (*traces, *conditioned_values()) if known is not None)


def conditioned_values() -> list[Any]:
    """Return the values of sites that ``poutine.condition`` gives around, as ``Predictive`` does."""
    return [each.data for each in handlers_around() if isinstance(each, ConditionMessenger)]


@contextmanager
def outside_plates() -> Iterator[None]:
    """Hide the plates from a block, in which ``poutine.block`` hides the rest from Pyro's handlers."""
    token = _FIRST.set(len(_PYRO_STACK))
    try:
        yield
    finally:
        _FIRST.reset(token)


# ---- sample sites that modules declare ---------------------------------------------------------------


def declared_samples(module: nn.Module) -> dict[str, Any]:
    """Return the priors of a module's ``PyroSample`` attributes, by attribute, before it has run."""
    return vars(module).get("_pyro_samples", {})


def declared_name(module: PyroModule, attribute: str) -> str:
    """Return the name that an attribute's site will have; Pyro has it after the first run only."""
    return f"{module._pyro_name}.{attribute}" if module._pyro_name else attribute


def site_name(module: PyroModule, attribute: str) -> str:
    """Return the name of an attribute's site in a run of the model, the owner's site if it is tied."""
    return str(module._pyro_get_fullname(attribute))


def make_pyro_module(net: Any, base: type[PyroModule]) -> None:
    """Turn a module and all in it into PyroModules of a base class, in place.

    Pyro's own conversion refuses classes with another metaclass, such as ``abc.ABC``'s, and
    takes each child out for a moment, which adapters of ``peft`` do not survive.
    """
    plain = [module for module in net.modules() if not isinstance(module, PyroModule)]
    for module in plain:
        module.__class__ = _with_base(type(module), base)  # type: ignore[arg-type]
        context = {"_pyro_name": "", "_pyro_context": _Context()}
        vars(module).update(context, _pyro_params=OrderedDict(), _pyro_samples=OrderedDict())
    net._pyro_set_supermodule(net._pyro_name, net._pyro_context)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before it became a PyroModule here, or the class it has."""
    return vars(type(module)).get("_plain_class", type(module))


def make_plain_module(module: nn.Module) -> None:
    """Give a module the class that it had, without what Pyro keeps in it."""
    kind = plain_class(module)
    if kind is not type(module):
        module.__class__ = kind
        for name in [name for name in vars(module) if name.startswith("_pyro_")]:
            del vars(module)[name]


@cache
def _with_base(kind: Any, base: Any) -> Any:
    """Return a module's class mixed with a base, under the names by which libraries look it up."""
    modules = (each for each in kind.__mro__ if issubclass(each, nn.Module))
    plain = next(each for each in modules if issubclass(_PyroModuleMeta, type(each)))
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_plain_class": kind}
    own |= {name: base._refuse for name in base._refused if hasattr(kind, name)}
    own["__reduce__"] = _reduce
    if kind.__getstate__ is not nn.Module.__getstate__:  # as of recurrent layers
        own["__getstate__"] = _state
    if hasattr(kind, "__deepcopy__"):
        own["__deepcopy__"] = _deepcopy
    if getattr(kind, "__getitem__", None) in _SLICED:
        own["__getitem__"] = _item
    mixed = () if plain is nn.Module else (PyroModule[plain],)
    if plain is kind:
        return _PyroModuleMeta(f"Pyro{kind.__name__}", (*mixed, base), own)
    joint: Any = type(f"Pyro{type(kind).__name__}", (_PyroModuleMeta, type(kind)), {})
    return joint(f"Pyro{kind.__name__}", (kind, *mixed, base), own)


_SLICED = (nn.Sequential.__getitem__, nn.ParameterList.__getitem__)


def _item(self: Any, index: Any) -> Any:
    """Return an item of a container, or a slice without Pyro's class, which would rename its modules."""
    if not isinstance(index, slice):
        return plain_class(self).__getitem__(self, index)  # type: ignore[index]
    if isinstance(self, nn.ParameterList):  # a draw in a list of parameters would become one
        return [self[each] for each in range(len(self))[index]]
    return plain_class(self)(OrderedDict([*self._modules.items()][index]))


def _reduce(self: PyroModule) -> tuple[Any, ...]:
    """Return how a module of a mixed class is copied and pickled."""
    return _new_module, (plain_class(self), type(self).__bases__[-1]), self.__getstate__()


def _state(self: PyroModule) -> dict[str, Any]:
    """Return the state that a class with its own way of copying has, as the base changes it."""
    base: Any = type(self).__bases__[-1]
    return base._state_of_copy(self, partial(plain_class(self).__getstate__, self))


def _deepcopy(self: PyroModule, memo: dict[int, Any]) -> Any:
    """Copy a module whose class has its own way, which leaves out Pyro's names in graphs of torch.fx."""
    base: Any = type(self).__bases__[-1]
    new = memo[id(self)] = _new_module(plain_class(self), base)
    vars(new).update(copy.deepcopy(base.__getstate__(self), memo))
    return new


def _new_module(kind: Any, base: Any) -> Any:
    return object.__new__(_with_base(kind, base))


def tie_site(module: PyroModule, attribute: str, owner: PyroModule, owners_attribute: str) -> None:
    """Give an attribute's site the name of another module's site, so that both read one value."""
    names = module.__dict__.setdefault("_pyro_get_fullname", _TiedNames(module))
    names.tied[attribute] = (owner, owners_attribute)


class _TiedNames:
    """The names of the sites of a module some of whose attributes are tied."""

    def __init__(self, module: PyroModule) -> None:
        self.module = module
        self.tied: dict[str, tuple[PyroModule, str]] = {}

    def __call__(self, attribute: str) -> str:
        if attribute in self.tied:
            return site_name(*self.tied[attribute])
        return str(PyroModule._pyro_get_fullname(self.module, attribute))


def can_sample(module: PyroModule, name: str) -> bool:
    """Whether a module's site has a value in a pass that is running, or a handler to get one from."""
    context = module._pyro_context
    if not context.active:
        return False
    return bool(_PYRO_STACK) or context.cache.get(site_name(module, name)) is not None


def fixed_draw_around() -> Any:
    """Return the handler that entered last, if it gives a whole block one draw, or None."""
    handler = _PYRO_STACK[-1] if _PYRO_STACK else None
    return handler if getattr(handler, "fixes_draw", False) else None


def lists_values(module: PyroModule) -> bool:
    """Whether a pass of a module's model is running, whose ``parameters()`` belong to the pass."""
    return module._pyro_context.active > 0 or fixed_draw_around() is not None


def was_called(net: nn.Module) -> bool:
    """Whether a net was called as a model by itself, after which Pyro does not rename its sites."""
    return isinstance(net, PyroModule) and bool(net._pyro_context.used)


def values_of_pass(net: PyroModule) -> dict[str, Tensor]:
    """Return the values that the sites of a net have in the pass that is running, by name."""
    return net._pyro_context.cache


def keep_values_in(net: PyroModule, values: dict[str, Tensor]) -> None:
    """Let a net keep the values of its sites in another dictionary, which may answer for what it lacks.

    Pyro keeps them for one pass, and a layer that is computed again in the backward pass needs them.
    """
    net._pyro_context.cache = values


@contextmanager
def site_values(net: PyroModule) -> Iterator[dict[str, Tensor]]:
    """Open the values of a net's sites by name, so that it runs at given values without handlers."""
    with net._pyro_context:
        yield net._pyro_context.cache


# ---- the param store ---------------------------------------------------------------------------------

_MIRRORED: WeakValueDictionary[str, nn.Parameter] = WeakValueDictionary()


def mirror_parameter(name: str, parameter: nn.Parameter) -> None:
    """Show a module's own parameter in Pyro's param store.

    ``pyro.param`` keeps what the store already has under the name, the parameter of another guide.
    """
    stale = _PYRO_PARAM_STORE._params.get(name)
    if stale is not None and stale is not parameter:  # let go of a former guide's
        _PYRO_PARAM_STORE._param_to_name.pop(stale, None)
    _PYRO_PARAM_STORE._params[name] = _MIRRORED[name] = parameter
    _PYRO_PARAM_STORE._constraints[name] = constraints.real
    _PYRO_PARAM_STORE._param_to_name[parameter] = name


def loaded_parameter(name: str) -> Tensor | None:
    """Return what a user has put or loaded into Pyro's store under a name; None if nothing."""
    stored = stored_parameter(name)
    return None if stored is _MIRRORED.get(name) else stored


def show_parameters(module: PyroModule, attribute: str, value: nn.Parameter | nn.Module) -> None:
    """In a pass, mirror a module's parameters in place of a former module's under their names.

    The module uses its own, and ``SVI`` trains the parameters that the store has.
    """
    if not module._pyro_context.active:
        return
    name = module._pyro_get_fullname(attribute)
    shown = {name: value} if isinstance(value, nn.Parameter) else {}
    if isinstance(value, nn.Module):
        shown = {param_with_module_name(name, key): own for key, own in value.named_parameters()}
    for key, parameter in shown.items():
        stored = stored_parameter(key)
        if stored is not None and stored is not parameter:
            mirror_parameter(key, parameter)


def has_parameters(prefix: str) -> bool:
    """Whether Pyro's param store mirrors parameters whose names begin with a prefix."""
    # A copy, since a guide that is collected meanwhile leaves the store.
    pairs = [*_PYRO_PARAM_STORE._params.items()]
    return any(name.startswith(prefix) and _MIRRORED.get(name) is own for name, own in pairs)


def forget_parameters(prefix: str) -> None:
    """Drop the entries of Pyro's param store whose names begin with a prefix, constrained or not."""
    for name in [*_PYRO_PARAM_STORE._params]:
        if name.startswith(prefix):
            _PYRO_PARAM_STORE._param_to_name.pop(_PYRO_PARAM_STORE._params.pop(name, None), None)
            _PYRO_PARAM_STORE._constraints.pop(name, None)


def stored_parameter(name: str) -> Tensor | None:
    """Return the unconstrained parameter that Pyro's store has under a name, or None."""
    return _PYRO_PARAM_STORE._params.get(name)


def stored_parameters() -> dict[str, Tensor]:
    """Return all unconstrained parameters that Pyro's store has now, by name."""
    return dict(_PYRO_PARAM_STORE._params)


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names under which a PyroModule has shown its plain parameters in the param store."""
    if not isinstance(module, PyroModule) or not was_called(module):
        return []
    return [module._pyro_get_fullname(name) for name in module._parameters]


def module_parameter(name: str, args: tuple[Any, ...]) -> nn.Parameter | None:
    """Return the parameter that a ``pyro.param`` with these arguments reads, as one of a module.

    A module that ``pyro.module`` shows uses its own. The store has any other, as a tensor.
    """
    stored = args[1] if "$$$" in name and len(args) > 1 else stored_parameter(name)
    if stored is None or isinstance(stored, nn.Parameter):
        return stored
    parameter = nn.Parameter(stored.detach())
    _PYRO_PARAM_STORE._param_to_name.pop(stored, None)
    _PYRO_PARAM_STORE._params[name] = parameter
    _PYRO_PARAM_STORE._param_to_name[parameter] = name
    return parameter


# ---- optimizers ---------------------------------------------------------------------------------------


def has_stepped(optim: PyroOptim) -> bool:
    """Whether a Pyro optimizer has the state of single parameters, which one optimizer would drop."""
    return bool(optim.optim_objs or optim._state_waiting_to_be_consumed)


def optimizer_options(optim: PyroOptim, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the arguments of torch's optimizer that a Pyro optimizer has for a parameter."""
    return optim._get_optim_args(parameter)


def gradient_clip(
    optim: PyroOptim, parameter: nn.Parameter
) -> Callable[[nn.Parameter], None] | None:
    """Return how a Pyro optimizer clips a parameter's gradient in place, or None."""
    return optim._get_grad_clip(parameter)
