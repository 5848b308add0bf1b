"""Random parameters of a net, which have values during a pass of the model only."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Never, Self

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_structvi._nested import nested_tensors
from pyro_structvi._pyro import (
    can_sample,
    declared_name,
    declared_samples,
    fixed_draw_around,
    is_given,
    keep_values_in,
    lists_values,
    plain_class,
    show_parameters,
    site_name,
    users_plate_around,
    values_of_pass,
)
from pyro_structvi._torch import (
    METADATA,
    after_backward,
    forget_parametrizations,
    forward_hooks,
    has_overlap,
    inside_backward,
    inside_reentrant_backward,
    parts_kept,
    take_apart,
    without_storage,
)
from pyro_structvi.nn.priors import BufferedPrior, drop_plates
from pyro_structvi.weights.lazy import WeightPlaceholder
from pyro_structvi.weights.torch_distributions import example_of

_DETACHING = {Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]
_MISSING = object()

Contents = list[tuple[dict[Any, Any], dict[Any, Any]]]


class UnsampledParameter(Tensor):
    """A tensor with shape, dtype and device that raises an error if its values are read."""

    site: str

    def __new__(cls, site: str, shape: torch.Size, like: Tensor) -> Self:
        """Make the tensor for a site, with the dtype and the device of ``like``."""
        unsampled = without_storage(cls, shape, like)
        unsampled.site = site
        return unsampled

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"UnsampledParameter(site='{self.site}', shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return metadata; detaching returns the tensor itself."""
        if func in METADATA or func is Tensor.data_ptr:
            return super().__torch_function__(func, types, args, kwargs or {})
        return args[0] if func in _DETACHING else cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Never:
        _refuse(next(each.site for each in nested_tensors([args, kwargs]) if isinstance(each, cls)))


def _refuse(site: str) -> Never:
    raise RuntimeError(
        f"The parameter '{site}' is random, and no pass defines its draw. Predict by "
        "`predict(model, guide, x)`; take a plain net, which generates, merges and saves, by "
        "`guide.to_net()`; call the model inside of `with guide.sampled():` for one draw; for prior "
        "draws pass the model to `pyro.infer.Predictive`."
    )


def prior_of(module: PyroModule, attribute: str) -> Any:
    """Return the prior of a declared site, at the median of its scale if that is another site."""
    prior = declared_samples(module)[attribute]
    return prior if hasattr(prior, "sample") else getattr(prior, "at_median", prior)(module)


def check_in_pass(module: PyroModule, name: str) -> None:
    """Raise a ``RuntimeError`` unless a pass defines the draw of a random parameter."""
    if not can_sample(module, name):
        _refuse(declared_name(module, name))


class OwnParameters(PyroModule):
    """A PyroModule that uses its own parameters, frozen or not, whatever Pyro's param store has."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute; a frozen parameter past the store, which would unfreeze it."""
        found = vars(self).get("_parameters", {}).get(name)
        if found is None:
            found = vars(self).get("_modules", {}).get(name)
        elif not found.requires_grad:
            return found
        if found is not None and not isinstance(found, PyroModule):
            show_parameters(self, name, found)
        return super().__getattr__(name)


class RandomModule(OwnParameters):
    """A PyroModule whose random parameters are read during passes of the model only.

    Pyro samples a parameter that is read outside of a pass from the prior, so a net that predicts,
    merges or is saved outside of a guide would use prior draws.
    """

    _refused = ("save_pretrained", "push_to_hub")

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "A net with random parameters has no weights to save as a pretrained net. Save "
            "`guide.to_net()`, or keep the posterior by `guide.state_dict()`."
        )

    def __getattr__(self, name: str) -> Any:
        """Return an attribute; a random parameter outside of passes is a tensor without values."""
        if name not in declared_samples(self) or can_sample(self, name):
            return super().__getattr__(name)
        own = values_of_pass(self)  # a function under a checkpoint runs outside of the net, too
        again = own.again(site_name(self, name)) if isinstance(own, _PassValues) else None
        if again is not None:
            return again
        prior = prior_of(self, name)
        return UnsampledParameter(declared_name(self, name), prior.shape(), example_of(prior))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a tensor in place of a random parameter lasts for one pass."""
        is_value = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if is_value and name in declared_samples(self):
            check_in_pass(self, name)
            values_of_pass(self)[site_name(self, name)] = value
        else:
            super().__setattr__(name, value)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Yield parameters by name; in a pass random and frozen ones too, in the net's own order.

        Code that takes a second parameter reads values, not only a device, so all are sampled then.
        """
        if not lists_values(self):
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        own = [(prefix, self)]
        modules = self.named_modules(None, prefix, remove_duplicate) if recurse else own
        for number, (name, value) in enumerate(_named_values(modules, remove_duplicate)):
            draw = getattr(value, "materialize", lambda value=value: value)
            yield name, draw() if number else value
            draw()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return self._state_of_copy(super().__getstate__)

    def _state_of_copy(self, state_of: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a state without caches of passes, with leaves in place of computed tensors.

        Hooks and recurrent layers keep computed weights, also in lists, and torch copies leaves only.
        """
        _forget_caches([self])
        return {name: _as_leaves(value) for name, value in state_of().items()}


def _as_leaves(value: Any) -> Any:
    """Return a computed tensor as a leaf, also in a list; any other value is unchanged."""
    if type(value) is list and any(map(_is_computed, value)):
        return [*map(_as_leaves, value)]
    return value.detach() if _is_computed(value) else value


def _is_computed(value: Any) -> bool:
    stands_for_values = isinstance(value, (UnsampledParameter, WeightPlaceholder))
    return isinstance(value, Tensor) and not stands_for_values and not value.is_leaf


def _named_values(modules: Any, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    """Yield the values of all parameters of the original net."""
    seen: dict[int, Any] = {}
    for path, module in modules:
        known = vars(module).get("parameter_names")
        known = declared_samples(module) if known is None else known
        own = dict(nn.Module.named_parameters(module, "", False, False))
        for attribute in dict.fromkeys([*known, *own]):
            value = getattr(module, attribute)
            if not remove_duplicate or id(value) not in seen:
                seen[id(value)] = value
                yield (f"{path}.{attribute}" if path else attribute), value


# ---- every site in every pass --------------------------------------------------------------------


def sample_every_site(module: nn.Module) -> None:
    """Let each call of a module sample all sites that it and its parts declare.

    A weight belongs to the model even if a pass skips it, such as an expert without examples or a
    dropped layer. All priors then have their KL in every pass. Sites of random modules are sampled
    before anything else. A user's own modules sample their sites where they read them, or after the
    pass.

    The values of a pass are kept as long as it can be differentiated, so that activation checkpointing
    recomputes layers with the same weights.
    """
    if isinstance(module, PyroModule) and _sample_declared not in forward_hooks(module):
        module.register_forward_pre_hook(_sample_declared)
        if not isinstance(module, RandomModule):
            module.register_forward_hook(_sample_skipped)
        module.register_forward_hook(_keep_values, always_call=True)


def check_any_in_pass(module: nn.Module, args: Any) -> None:
    """Let a call of a module outside of passes raise an error if it has random parameters: a hook."""
    for part in module.modules():
        for attribute in declared_samples(part):
            check_in_pass(part, attribute)
            return


def _sample_declared(module: PyroModule, args: Any) -> None:
    own = values_of_pass(module)
    if not isinstance(own, _PassValues):
        own = _PassValues(own)
        keep_values_in(module, own)
    own.effects.begin(module)
    forget_parametrizations()
    for part in random_modules(module):
        _check_plates(part, own)
        read_declared(part)
        drop_plates(part, own)


def _check_plates(module: nn.Module, own: Mapping[str, Tensor]) -> None:
    """Raise a ``ValueError`` where a user's plate would draw the sites of a net for each example."""
    plate = users_plate_around()
    if plate is None:
        return
    parts = module.modules()
    names = [site_name(part, each) for part in parts for each in declared_samples(part)]
    new = [name for name in names if name not in own and not is_given(name)]
    if new:
        raise ValueError(
            f"The net must not be called inside of the plate '{plate}', where each example would have "
            f"draws of its own of {new}. Call it in front of the plate, `f = net(x)` and then "
            f"`with pyro.plate('{plate}', ...):`, or between two blocks of the plate. For one net per "
            "member of a plate at `dim=-2` use `pyro_structvi.nn.likelihood.run_in_plates(net, ...)[0]`."
        )


def random_modules(module: Any) -> Iterator[nn.Module]:
    """Yield the outermost random modules in a module; none of a function.

    A user's own module may read its sites in a plate or under another handler, which they belong to.
    """
    if isinstance(module, RandomModule):
        yield module
        return
    for child in module.children() if isinstance(module, nn.Module) else ():
        yield from random_modules(child)


def _sample_skipped(module: PyroModule, args: Any, outputs: Any) -> None:
    read_declared(module)


def read_declared(module: nn.Module) -> None:
    """Read all declared sites of a module and its parts; Pyro samples those without a value."""
    for part in module.modules():
        for attribute in declared_samples(part):
            getattr(part, attribute)


def sites_of_every_pass(model: nn.Module) -> set[str]:
    """Return the names of the sites that each pass of a model samples, whether it uses them or not."""
    found = set()
    for module in model.modules():
        hooks = forward_hooks(module)
        if _sample_declared not in hooks:
            continue
        for owner in [module] if _sample_skipped in hooks else random_modules(module):
            for part in owner.modules():
                found |= {declared_name(part, attribute) for attribute in declared_samples(part)}
    return found


def _keep_values(module: PyroModule, args: Any, outputs: Any) -> None:
    own = values_of_pass(module)
    if not isinstance(own, _PassValues):  # the pass has not begun
        return
    own.effects.end(module)
    for output in take_apart(outputs)[0]:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            own.keep_for_backward(output)


PASS_HOOKS = (check_any_in_pass, _sample_declared, _sample_skipped, _keep_values)


class _PassEffects:
    """Tensors that a pass in evaluation mode has stored in modules, to be removed before the next pass.

    A net in evaluation mode may cache functions of its weights, which differ between draws. A cache
    stays readable until the next pass, or in a whole block with one draw. Other attributes that change
    along with tensors, such as lengths, are restored too.
    """

    def __init__(self) -> None:
        self._root: nn.Module | None = None
        self._block: Any = None
        self._before: list[Contents] = []
        self._left: dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]] = {}

    def begin(self, root: nn.Module) -> None:
        """Remove the caches of the previous pass, and record the attributes of the modules."""
        if self._root is not None:
            return
        block = fixed_draw_around()
        if block is None or block is not self._block:
            self.undo()
        self._root, self._block = root, block
        self._before = [
            [
                (each, dict(each))
                for each in (vars(part), *vars(part).values())
                if isinstance(each, dict)
            ]
            for part in root.modules()
            # The modules of torch cache nothing.
            if not part.training and not plain_class(part).__module__.startswith("torch.nn.")
        ]

    def end(self, root: nn.Module) -> None:
        """Record the changes of the pass that began at a module."""
        if self._root is not root:
            return
        for contents in self._before:
            changes = [*_changes(contents)]
            holds_tensor = any(True for _ in nested_tensors([new for *_, new in changes]))
            for container, key, old, new in changes if holds_tensor else ():
                _, first, _ = self._left.get((id(container), key), (None, old, None))
                self._left[id(container), key] = container, first, new
        self._root, self._before = None, []

    def undo(self) -> None:
        """Restore attributes that did not change again after the pass."""
        for (_, key), (container, old, new) in self._left.items():
            if container.get(key, _MISSING) is not new:
                continue
            if old is _MISSING:
                container.pop(key, None)
            else:
                container[key] = old
        self._left = {}


def _changes(contents: Contents) -> Iterator[tuple[dict[Any, Any], Any, Any, Any]]:
    for container, before in contents:
        for key in {**before, **container}:
            old, new = before.get(key, _MISSING), container.get(key, _MISSING)
            if old is not new:
                yield container, key, old, new


@contextmanager
def transient_pass(modules: Collection[nn.Module]) -> Iterator[None]:
    """Run modules on values that end with a block, as those under vmap, and leave none of them there."""
    _forget_caches(modules)
    with parts_kept(modules):
        yield
    _forget_caches(modules)


def _forget_caches(modules: Collection[nn.Module]) -> None:
    """Remove what a pass has stored in modules in evaluation mode, as before the next one."""
    for module in modules:
        values = values_of_pass(module) if isinstance(module, PyroModule) else None
        if isinstance(values, _PassValues):
            values.effects.undo()


class _PassValues(dict[str, Tensor]):
    """The values of a net's sites in the current pass; in a backward pass, of the differentiated pass.

    Activation checkpointing calls layers again in the backward pass, outside of the net. The gradient of
    the net's output, which is computed first, identifies the pass.
    """

    _differentiated: dict[str, Tensor] | None = None

    def __init__(self, values: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(values or {})
        self.effects = _PassEffects()

    def __reduce__(self) -> Any:
        """Copy nothing: values belong to a pass of these modules."""
        return _PassValues, ()

    def keep_for_backward(self, output: Tensor) -> None:
        """Keep the present values as long as an output of this pass can be differentiated."""
        values = dict(self)

        def begin(gradient: Tensor) -> None:
            self._differentiated = values
            after_backward(self._end)

        output.register_hook(begin)

    def _end(self) -> None:
        self._differentiated = None

    def get(self, name: str, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        """Return the value at a site, or the default if it is not sampled in this pass."""
        value = super().get(name)
        if value is not None or not inside_backward():
            return default if value is None else value
        value = self.again(name)
        if value is None:
            raise RuntimeError(
                f"The weight at site '{name}' is needed again in a backward pass, and the pass that it "
                "belongs to is not known. Checkpoint parts of the net, not the whole net, pass "
                "`use_reentrant=False` to `torch.utils.checkpoint.checkpoint`, and `vectorize=False` to "
                "a mixture, since draws in one pass cannot be computed again."
            )
        return value

    def again(self, name: str) -> Tensor | None:
        """Return the value at a site in a backward pass that computes it again, or None."""
        value = (self._differentiated or {}).get(name)
        return _as_leaf(value) if value is not None and inside_reentrant_backward() else value


def _as_leaf(value: Tensor) -> Tensor:
    """Return a leaf that passes its gradient on to the value.

    A reentrant checkpoint differentiates the recomputed graph and frees it; the graph of a draw is
    shared with the KL.
    """
    if not value.requires_grad:
        return value
    leaf = value.detach().requires_grad_()

    def pass_on(leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        torch.autograd.backward(value, gradient, retain_graph=True)

    leaf.register_post_accumulate_grad_hook(pass_on)
    return leaf


# ---- frozen parameters and state dicts -----------------------------------------------------------


def freeze(module: nn.Module, attribute: str) -> None:
    """Turn a parameter into a buffer with the same memory: Pyro's param store would unfreeze it."""
    parameter = getattr(module, attribute)
    is_usual = type(parameter) is nn.Parameter
    delattr(module, attribute)
    module.register_buffer(attribute, parameter.detach() if is_usual else parameter)
    if not is_usual:  # a quantized weight is read by its class; Pyro changes registered attributes
        module.__dict__[attribute] = parameter
    module.__dict__.setdefault("frozen_parameters", []).append(attribute)


def frozen_names(module: nn.Module) -> list[str]:
    """Return the attributes of a module that were frozen parameters."""
    return vars(module).get("frozen_parameters", [])


def frozen_keys(module: nn.Module) -> set[str]:
    """Return the keys of frozen parameters in the state dict of a module."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, part in module.named_modules(remove_duplicate=False)
        for name in frozen_names(part)
    }


def buffers_that_change(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module, without its children, that a pass may change."""
    frozen = frozen_names(module)
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in frozen:
            yield name, buffer


def separate_elements(module: nn.Module) -> None:
    """Give each element of the buffers of a module and its parts a place, for a state to be loaded."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if has_overlap(buffer):
                setattr(part, name, buffer.clone())


def prior_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module, without its children, that define priors."""
    for prior in declared_samples(module).values():
        for name in prior.buffers.values() if isinstance(prior, BufferedPrior) else ():
            yield name, module.get_buffer(name)


def keep_priors_only(module: PyroModule, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Remove draws from a state dict and add priors, if a module writes its weights into it."""
    for attribute in declared_samples(module):
        state.pop(prefix + attribute, None)
    for name, buffer in prior_buffers(module):
        state.setdefault(prefix + name, buffer.detach())
