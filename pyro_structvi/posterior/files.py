"""Files of fitted posteriors, in the format of safetensors."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from glob import escape
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from secrets import token_hex
from stat import S_IMODE
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from safetensors.torch import save_file
from torch import Tensor, nn

from pyro_structvi._checks import Program, brief, checked, shape_text
from pyro_structvi._pyro import declared_samples, plain_class, unwrapped
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.nn.priors import BufferedPrior, ScaledPrior
from pyro_structvi.nn.random_module import frozen_keys, separate_elements
from pyro_structvi.posterior.pruning import prune_inducing_factors
from pyro_structvi.sites.autoguide import MODEL_SUMS, check_made_of
from pyro_structvi.sites.family import Family, check_options
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.torch_distributions import base_of, tensors_of

KEY = "pyro_structvi"  # of the header in the metadata of a file
FORMAT = 5
PACKAGES = ("pyro-structvi", "torch", "pyro-ppl")
MOST_NAMED = 5
LEFT_FOR = 3600.0  # seconds
# Errors of a header that describes no guide.
MALFORMED = AttributeError, KeyError, NotImplementedError, RecursionError, TypeError
OF_ANY_SHAPE = ("._extra_state", f".{MODEL_SUMS}")  # options of families, and tensors of the model
MASK = "_factor_mask"  # of pruned inducing weights

Parts = Mapping[str, Mapping[str, Any]]  # properties of parts, by their paths


@checked
def save(
    path: str | PathLike[str], model: Program, guide: StructuredGuide, *, frozen: bool = True
) -> None:
    """Write a fitted posterior to a file of safetensors, with all that :func:`load` needs.

    The file has the state dicts of guide and model, and in its header the class of the guide, the
    families of sites with their options, the classes and options of the model's modules, the kinds of
    its priors, and the versions of packages. A file that exists is replaced in one step. All parameters
    of a loaded guide require gradients, since the file does not tell which ones did.

    Args:
        path: The path of the file.
        model: The model. A function has no state; ``pyro.get_param_store().save`` writes the parameters
            that it reads by ``pyro.param``.
        guide: The guide.
        frozen: Whether to write the model's frozen parameters, those that require no gradients. False
            keeps a large base out of the file, which has only digests of its bytes; :func:`load` refuses
            another base, and one that is not frozen.

    Raises:
        TypeError: If an option of the guide is a function, an entry of a state dict is not a tensor, or
            safetensors lacks its dtype, such as ``torch.complex128``.
        ValueError: If the guide is of another model or has no site yet, a tensor is on the meta device,
            or the path is a folder's.
        OSError: If the file cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize
        >>> model = Regressor(bayesianize(nn.Linear(3, 2), prior=1.0), 10, noise_scale=0.1)
        >>> guide = KTiedGuide(model, rank=1)  # to be fitted
        >>> with TemporaryDirectory() as folder:
        ...     save(f"{folder}/posterior.safetensors", model, guide)
        ...     load(f"{folder}/posterior.safetensors", model)["net.weight"].family
        KTied(rank=1)
    """
    if not guide.site_names:
        raise ValueError(
            "`guide` must know its sites, but its model declares none before it runs. Fit the guide, or "
            "call `guide.initialize(...)` with the model's arguments, first."
        )
    check_made_of(guide, model, "save(path, guide.model, guide)")
    left_out = {} if frozen else _frozen_in(model)
    tensors = {
        key: value.clone(memory_format=torch.contiguous_format)  # tied ones are separate in a file
        for name, part in (("guide", guide), ("model", model))
        for key, value in _state_of(name, part).items()
        if key not in left_out
    }
    header = {
        "format": FORMAT,
        "versions": {name: _version_of(name) for name in PACKAGES},
        "guide": _write_guide(guide, tensors),
        "model": parts_of(model),
        "left_out": {key: _digest(value) for key, value in left_out.items()},
    }
    path = Path(path)
    if not path.name or path.is_dir():
        raise ValueError(f"`path` must be that of a file, but '{path}' is a folder. Add a name.")
    metadata = {KEY: json.dumps(header)}
    write_atomically("path", path, lambda partial: save_file(tensors, partial, metadata))


@checked
def load(
    path: str | PathLike[str], model: Program, guide: StructuredGuide | None = None
) -> StructuredGuide:
    """Read a file of :func:`save`: return its guide, and give the model its state.

    Nothing in a file is run as code, and everything is compared before a parameter changes. Tensors of
    the model, such as the scales of priors and of known noise, are replaced by the file's.
    Functions, such as those that a net's ``forward`` calls, are not compared, and neither are attributes
    of a user's modules, dropout, ``num_data`` and other settings of training.

    Args:
        path: The path of the file.
        model: A model made like the model of the file: the same modules, likelihood and kinds of priors.
        guide: A guide to load into, with the families of the file. None to make it by the header, which
            needs a model that declares its sites, as ``bayesianize`` does.

    Returns:
        The guide. A guide of a user's class has the nearest class of this package, unless it is passed
        as ``guide``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it was not written by :func:`save`, has another format or an unknown family, or
            belongs to another model or guide; if the model is on the meta device.
        RuntimeError: If ``guide`` has families of other classes or options.

    Example:
        See :func:`save`.
    """
    devices = (own.device for own in _state_of("model", model).values())
    header, tensors = _read(Path(path), next(devices, torch.device("cpu")))
    if guide is None:
        guide = _read_guide(header, model, tensors)
        members = enumerate(getattr(guide, "members", ()))
        each = {f"guide.members.{number}.": member for number, member in members}
        for prefix, own in (each or {"guide.": guide}).items():
            if any(key.startswith(prefix) and key.endswith(MASK) for key in tensors):
                prune_inducing_factors(own, 0)  # makes the masks
    check_made_of(guide, model, "load(path, guide.model, guide)")
    check_options(guide, tensors, "guide.")
    parts: dict[str, Any] = {"model": model, "guide": guide}
    states = {name: _state_of(name, part) for name, part in parts.items()}
    digests = header["left_out"]
    frozen = _frozen_in(model) if digests else {}
    wrong = [key for key in digests if key not in frozen or _digest(frozen[key]) != digests[key]]
    if wrong:
        raise ValueError(
            "`model` must have the frozen parameters beside which the file was saved, but "
            f"{', '.join(repr(key) for key in wrong[:MOST_NAMED])} differ. Make the model from the same "
            "base, with these frozen. Nothing was loaded."
        )
    tensors |= {key: frozen[key] for key in digests}
    for name, own in states.items():
        found = {key: value for key, value in tensors.items() if key.startswith(f"{name}.")}
        _compare(name, "shape", _shapes_of(found), _shapes_of(own))
    check_parts(header["model"], model)
    for name, own in states.items():
        if own:
            loaded = {key.removeprefix(f"{name}."): tensors[key] for key in own}
            module = unwrapped(parts[name])
            separate_elements(module)
            module.load_state_dict(loaded)
    return guide


def _version_of(package: str) -> str:
    """Return the version of a package, which may be on the path without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


# ---- states --------------------------------------------------------------------------------------


def _state_of(name: str, part: Any) -> dict[str, Tensor]:
    """Return the state dict of a module, with a prefix; none of a function."""
    module = unwrapped(part)
    state = module.state_dict() if isinstance(module, nn.Module) else {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"`{name}` must have a state of tensors, but `{name}.state_dict()['{key}']` is "
                f"{brief(value)}. Keep it out of the state dict, or save the state by `torch.save`."
            )
        if not _can_hold(value.dtype):
            raise TypeError(
                f"`{name}` must have a state of dtypes that safetensors holds, but `{name}.state_dict()"
                f"['{key}']` is {value.dtype}. For a complex number keep `torch.view_as_real(...)`, or "
                "save the state by `torch.save`."
            )
        if value.is_meta:
            raise ValueError(
                f"`{name}` must have a state with values, but `{name}.state_dict()['{key}']` is on the "
                "meta device. Make model and guide on a device with memory, such as a CPU."
            )
    return {f"{name}.{key}": value.detach() for key, value in state.items()}


def _can_hold(dtype: torch.dtype) -> bool:
    """Whether a file can hold tensors of a dtype; safetensors has a private table."""
    try:
        to_bytes({"empty": torch.empty(0, dtype=dtype)})
    except KeyError:
        return False
    return True


def _frozen_in(model: Any) -> dict[str, Tensor]:
    """Return the frozen parameters of a model, by their keys in a file.

    They are buffers in a net by ``bayesianize``, and parameters without gradients in other modules.
    """
    module, keys = unwrapped(model), set()
    if isinstance(module, nn.Module):
        named = module.named_parameters(remove_duplicate=False)
        keys = frozen_keys(module) | {name for name, each in named if not each.requires_grad}
    state = _state_of("model", model)
    return {key: state[key] for key in state if key.removeprefix("model.") in keys}


def _digest(value: Tensor) -> str:
    content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(content.numpy().data).hexdigest()


def _shapes_of(state: Mapping[str, Tensor]) -> Parts:
    return {
        key: {
            "shape": "any" if key.endswith(OF_ANY_SHAPE) else f"{shape_text(own.shape)} {own.dtype}"
        }
        for key, own in state.items()
    }


def _compare(name: str, required: str, saved: Parts, own: Parts) -> None:
    """Raise unless a module has the parts of the file's, each with what both say of it.

    A part with the property ``required`` must be in both.
    """
    wrong = []
    for path in dict.fromkeys([*own, *saved]):
        theirs, ours = saved.get(path, {}), own.get(path, {})
        if required in (theirs.keys() ^ ours.keys()):
            where = "only the file has" if theirs else "the file has no"
            wrong.append(f"{where} '{path}', of {required} {(theirs or ours)[required]}")
            continue
        wrong += [
            f"'{path}' has {key} {theirs[key]} in the file and {ours[key]} here"
            for key in theirs
            if key in ours and theirs[key] != ours[key]
        ]
    if wrong:
        more = f", and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise ValueError(
            f"`{name}` must be made like that of the file, but {'; '.join(wrong[:MOST_NAMED])}{more}. "
            "Make the same net in the same dtype, with the same guide. Nothing was loaded."
        )


def _read(path: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a file."""
    if not path.is_file():
        raise FileNotFoundError(
            f"`path` must be a file, but got '{path}', where there is none. Write it by "
            "`pyro_structvi.save`."
        )
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        header: dict[str, Any] = dict(json.loads(metadata[KEY], parse_constant=str))
        number, versions = header["format"], dict(header["versions"])
        if number == FORMAT:
            header["left_out"] = dict(header["left_out"])
            header["model"] = {path: dict(part) for path, part in dict(header["model"]).items()}
    except (SafetensorError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"`path` must be a file of `pyro_structvi.save`, but '{path}' is not. Read checkpoints and "
            "files of `torch.save` by `torch.load`."
        ) from error
    if number != FORMAT:
        wrote = versions.get(PACKAGES[0], "another version")
        raise ValueError(
            f"`path` must be a file of format {FORMAT}, but '{path}' has format {number}, by "
            f"{PACKAGES[0]} {wrote}. Read it with that version."
        )
    return header, tensors


# ---- parts of models -----------------------------------------------------------------------------

OF_TRAINING = {"dropout", "init", "inplace", "momentum", "sparse", "training"}  # of torch's modules
SETTING = (int, float, str, tuple)
EMPTY = ("Identity", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential")


def parts_of(model: Any) -> Parts:
    """Return the parts that a model's functions depend on besides its state, by paths of modules.

    Each module has its constants, as torch declares them for TorchScript, and the kinds of its priors. A
    module of torch has all its settings, since some are not declared, as the heads of attention. A
    likelihood or a module without parts has its class, too; others may be arranged in another way.
    """
    root = unwrapped(model)
    modules = root.named_modules(remove_duplicate=False) if isinstance(root, nn.Module) else ()
    parts = {}
    for path, module in modules:
        plain = plain_class(module)
        kind = plain.__name__.removeprefix("Pyro")
        if kind in EMPTY or "drop" in kind.lower():
            continue
        is_whole = isinstance(module, Likelihood) or not any(True for _ in module.children())
        own: dict[str, Any] = {"class": kind} if is_whole else {}
        constants = getattr(module, "__constants__", ())
        is_of_torch = plain.__module__.startswith("torch.nn.")
        for name, value in vars(module).items():
            is_setting = is_of_torch and isinstance(value, SETTING) and not name.startswith("_")
            if (is_setting or name in constants) and name not in OF_TRAINING:
                own[name] = value
        for attribute, prior in declared_samples(module).items():
            own[f"prior of {attribute}"] = _kind_of_prior(prior)
        if own:
            parts[path] = own
    # Lists in place of tuples, and names in place of NaN, which does not equal itself.
    return json.loads(json.dumps(parts, default=brief), parse_constant=str)


def check_parts(saved: Parts, model: Any) -> None:
    """Raise a ``ValueError`` unless a model has the parts that :func:`parts_of` has returned."""
    named = (
        {f"model.{path}".removesuffix("."): part for path, part in each.items()}
        for each in (saved, parts_of(model))
    )
    _compare("model", "class", *named)


def _kind_of_prior(prior: Any) -> str:
    if isinstance(prior, BufferedPrior):
        return prior.kind.__name__
    if isinstance(prior, ScaledPrior):
        return f"Normal of scale {prior.factor:.6g} {prior.scale}"
    if not isinstance(prior, torch.distributions.Distribution):
        return type(prior).__name__
    base = base_of(prior)  # whose tensors are in no state dict
    ranges = (f"{float(each.min()):.6g} to {float(each.max()):.6g}" for each in tensors_of(base))
    return f"{type(base).__name__} of {', '.join(ranges)}"


# ---- guides --------------------------------------------------------------------------------------


def _kinds() -> dict[str, type[StructuredGuide]]:
    kinds: list[type[StructuredGuide]] = [StructuredGuide, *_subclasses(StructuredGuide)]
    return {each.__name__: each for each in kinds if each.__module__.startswith(f"{KEY}.")}


def _write_guide(guide: StructuredGuide, tensors: dict[str, Tensor]) -> str:
    """Return the class and the options of a guide as JSON; tensors among them are added to others."""

    def encode(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = f"option.{len(tensors)}"
            tensors[key] = value.detach().clone(memory_format=torch.contiguous_format)
            return {"tensor": key}
        if isinstance(value, StructuredGuide):
            # The nearest class of this package, for a guide of a class of the user's.
            kind = next(kind for kind in type(value).__mro__ if kind in _kinds().values())
            return {"guide": kind.__name__, "options": value.options()}
        if isinstance(value, Family):
            options = {each.name: getattr(value, each.name) for each in fields(value)}
            return {"family": type(value).__name__, "options": options}
        if isinstance(value, (Integral, Real)):  # of NumPy
            return int(value) if isinstance(value, Integral) else float(value)
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(
            f"`guide` must have options that a file can hold, but one is {brief(value)}. Save "
            "`guide.state_dict()` by `torch.save`."
        )

    return json.dumps(guide, default=encode)


def _read_guide(
    header: Mapping[str, Any], model: Any, tensors: Mapping[str, Tensor]
) -> StructuredGuide:
    """Return the guide that :func:`_write_guide` describes, at its initial parameters."""

    def decode(value: dict[str, Any]) -> Any:
        match value:
            case {"tensor": str(key)}:
                return tensors[key].clone()  # which else would stay in the mapped file
            case {"guide": str(name), "options": dict(options)}:
                return _make_guide(name, model, options)
            case {"family": str(name), "options": dict(options)}:
                return _make_family(name, options)
        return {key: _in_tuples(own) for key, own in value.items()}  # options, or patterns

    try:
        guide: StructuredGuide = json.loads(header["guide"], object_hook=decode)
        guide.site_names  # noqa: B018
    except (*MALFORMED, json.JSONDecodeError) as error:
        raise ValueError(
            f"`path` must be a file of `pyro_structvi.save`, but its header describes no guide ({error})"
            ". Make the guide and pass it as `guide=`."
        ) from error
    return guide


def _in_tuples(value: Any) -> Any:
    """Return a value of JSON with tuples in place of lists."""
    return tuple(map(_in_tuples, value)) if isinstance(value, list) else value


def _make_guide(name: str, model: Any, options: dict[str, Any]) -> StructuredGuide:
    if name not in _kinds():
        raise ValueError(
            f"The guide of the file has the class {name}, which is unknown here. Make the guide and "
            "pass it as `guide=`."
        )
    made = _kinds()[name].from_options(model, **options)
    if not made.site_names:
        raise ValueError(
            "`guide` must be given for a model that declares no site before it runs. Make the guide, "
            "call `guide.initialize(...)` with the model's arguments, and pass `guide=guide`."
        )
    return made


def _make_family(name: str, options: dict[str, Any]) -> Family:
    found: list[type[Family]] = [kind for kind in _subclasses(Family) if kind.__name__ == name]
    found = [kind for kind in found if options.keys() <= {each.name for each in fields(kind)}][::-1]
    # A class of this package wins over the user's classes with its name, and of these the last one, as
    # of a notebook's cell that ran twice.
    found.sort(key=lambda kind: not kind.__module__.startswith(f"{KEY}."))
    if not found:
        raise ValueError(
            f"The file has the family {name}({', '.join(options)}), which is unknown here. Import the "
            "module that defines it, or read the file with the version that wrote it."
        )
    return found[0](**options)


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


# ---- writing -------------------------------------------------------------------------------------


def write_atomically(name: str, path: Path, write: Callable[[Path], Any]) -> None:
    """Write a temporary file, flush it to the disk, and rename it to a path; ``name`` is for errors.

    A link stays, and so does the mode of a file; a new file has the usual mode. The last of several
    writers replaces the files of the others.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f"{path.name}.{token_hex(4)}.partial")
    try:
        _remove_leftovers(path)
        partial.touch(exist_ok=False)
        mode = (path if path.exists() else partial).stat().st_mode
        write(partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.chmod(S_IMODE(mode))  # safetensors makes private files
        os.replace(partial, path)
    except Exception as error:
        raise OSError(
            f"`{name}` could not be written to '{path}', where the last one still is if there was "
            f"one: {error}"
        ) from error
    finally:
        with suppress(OSError):  # a name that is no path, and a file that was renamed
            partial.unlink()
    if os.name == "posix":  # elsewhere folders cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of killed writers of a path, which no one has written to for long."""
    for left in path.parent.glob(f"{escape(path.name)}.*.partial"):
        with suppress(OSError):  # another writer may remove it, or own it
            if time.time() - left.stat().st_mtime > LEFT_FOR:
                left.unlink()
