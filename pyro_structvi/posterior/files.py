"""Files of fitted posteriors, in the format of safetensors."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import singledispatch
from importlib.metadata import version
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pyro_structvi._checks import Program, brief, checked, shape_text
from pyro_structvi.sites.family import Family, check_options, choose_families
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.global_inducing.guide import GlobalInducingGuide
from pyro_structvi.structures.mixture import MixtureGuide

KEY = "pyro_structvi"  # of the header in the metadata of a file
FORMAT = 1
PACKAGES = ("pyro-structvi", "torch", "pyro-ppl")
MOST_NAMED = 5
OPTIONS = "._extra_state"  # of families; of any shape
OF_GLOBAL_INDUCING = ("first_layer", "train_inputs")

Json = dict[str, Any]


@checked
def save(path: str | PathLike[str], model: Program, guide: StructuredGuide) -> None:
    """Write a fitted posterior to a file of safetensors, with all that :func:`load` needs.

    The file has the state dicts of guide and model, such as running statistics and trained noise. Its
    header has the class of the guide, the families of sites with their options, and the versions of
    packages. A file that exists is replaced in one step.

    Args:
        path: The path of the file.
        model: The model. A function has no state.
        guide: The guide.

    Raises:
        TypeError: If an option of the guide is a function, or a state is no tensor.
        ValueError: If the guide has no site yet, or the path is a folder's.
        OSError: If the file cannot be written.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize
        >>> def make_model():
        ...     return Regressor(bayesianize(nn.Linear(3, 2), prior=1.0), 10, noise_scale=0.1)
        >>> model = make_model()
        >>> guide = KTiedGuide(model, rank=1)  # to be fitted
        >>> with TemporaryDirectory() as folder:
        ...     save(Path(folder) / "posterior.safetensors", model, guide)
        ...     other = load(Path(folder) / "posterior.safetensors", make_model())
        >>> other["net.weight"].family
        KTied(rank=1)
    """
    if not guide.site_names:
        raise ValueError(
            "`guide` must know its sites, but its model declares none before it runs. Fit the guide, or "
            "call `guide.initialize(...)` with the model's arguments, first."
        )
    tensors = _state_of("guide", guide) | _state_of("model", model)
    header = {
        "format": FORMAT,
        "versions": {name: version(name) for name in PACKAGES},
        "model": type(model).__name__,
        "guide": _describe(guide, tensors, "options"),
    }
    path = Path(path)
    if not path.name or path.is_dir():
        raise ValueError(f"`path` must be that of a file, but '{path}' is a folder. Add a name.")
    partial = path.with_name(f"{path.name}.partial")
    try:
        save_file(tensors, partial, {KEY: json.dumps(header)})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@checked
def load(
    path: str | PathLike[str], model: Program, guide: StructuredGuide | None = None
) -> StructuredGuide:
    """Read a file of :func:`save`: return its guide, and give the model its state.

    Nothing in a file is run as code. Files of any version of this package with the same format can be
    read. On an error nothing has changed.

    Args:
        path: The path of the file.
        model: A model made like the model of the file.
        guide: A guide to load into, with the families of the file. None to make it by the header, which
            needs a model that declares its sites, as ``bayesianize`` does.

    Returns:
        The guide.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no file of :func:`save`, has another format or an unknown family, or belongs
            to another model or guide.
        RuntimeError: If ``guide`` has families of other classes or options.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from pyro_structvi import Classifier, MatrixNormalGuide, bayesianize, predict
        >>> model = Classifier(bayesianize(nn.Linear(3, 2), prior=1.0), num_data=10)
        >>> guide = MatrixNormalGuide(model)  # to be fitted
        >>> with TemporaryDirectory() as folder:
        ...     save(f"{folder}/posterior.safetensors", model, guide)
        ...     loaded = load(f"{folder}/posterior.safetensors", model)
        >>> predict(model, loaded, torch.randn(5, 3)).mean.shape
        torch.Size([5, 2])
    """
    header, tensors = _read(Path(path))
    if guide is None:
        guide = _make(header["guide"], model, tensors)
    check_options(guide, tensors, "guide.")
    parts: list[tuple[str, Any]] = [("guide", guide), ("model", model)]
    for name, part in parts:
        _check_state(name, _state_of(name, part), tensors)
    for name, part in parts:
        if isinstance(part, nn.Module):
            own = {key.removeprefix(f"{name}."): tensors[key] for key in _state_of(name, part)}
            part.load_state_dict(own)
    return guide


# ---- states --------------------------------------------------------------------------------------


def _state_of(name: str, part: Any) -> dict[str, Tensor]:
    """Return the state dict of a module, with a prefix, as separate tensors; none of a function."""
    state = part.state_dict() if isinstance(part, nn.Module) else {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"`{name}` must have a state of tensors, but `{name}.state_dict()['{key}']` is "
                f"{brief(value)}. Keep it out of the state dict, or save the state by `torch.save`."
            )
    return {
        f"{name}.{key}": value.detach().clone(memory_format=torch.contiguous_format)
        for key, value in state.items()
    }


def _check_state(name: str, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise unless a file has the tensors of a module.

    Raises:
        ValueError: If names, shapes or dtypes differ.
    """
    found = {key: value for key, value in tensors.items() if key.startswith(f"{name}.")}
    wrong = [*_differences(own, found)]
    if wrong:
        more = f", and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise ValueError(
            f"`{name}` must be made like that of the file, but {'; '.join(wrong[:MOST_NAMED])}{more}. "
            "Make the same net in the same dtype, with the same guide. Nothing was loaded."
        )


def _differences(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[str]:
    for key in dict.fromkeys([*own, *found]):
        if key not in found:
            yield f"the file has no '{key}'"
        elif key not in own:
            yield f"only the file has '{key}'"
        elif key.endswith(OPTIONS):
            continue
        elif own[key].shape != found[key].shape or own[key].dtype != found[key].dtype:
            kinds = [f"{shape_text(each.shape)} {each.dtype}" for each in (found[key], own[key])]
            yield f"'{key}' is {kinds[0]} in the file and {kinds[1]} here"


def _read(path: Path) -> tuple[Json, dict[str, Tensor]]:
    """Return the header and the tensors of a file."""
    if not path.is_file():
        raise FileNotFoundError(
            f"`path` must be a file, but got '{path}', where there is none. Write it by "
            "`pyro_structvi.save`."
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        header: Json = dict(json.loads(metadata[KEY]))
        number = header["format"]
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"`path` must be a file of `pyro_structvi.save`, but '{path}' is none. Read checkpoints and "
            "files of `torch.save` by `torch.load`."
        ) from error
    if number != FORMAT:
        wrote = header.get("versions", {}).get(PACKAGES[0], "another version")
        raise ValueError(
            f"`path` must be a file of format {FORMAT}, but '{path}' has format {number}, by "
            f"{PACKAGES[0]} {wrote}. Read it with that version."
        )
    return header, tensors


# ---- guides --------------------------------------------------------------------------------------


@singledispatch
def _describe(guide: Any, tensors: dict[str, Tensor], prefix: str) -> Json:
    """Return the class and the options of a guide; tensors among them are added under a prefix."""
    raise NotImplementedError


@_describe.register
def _(guide: StructuredGuide, tensors: dict[str, Tensor], prefix: str) -> Json:
    families = {guide[name].site.name: guide[name].family for name in guide.site_names}
    chosen = choose_families({name: guide[name].site for name in families}, guide.families)
    changed = {  # by pruning
        name: family for name, family in families.items() if family != chosen[name]
    }
    return _description(guide, {**changed, **guide.families}, tensors, prefix)


@_describe.register
def _(guide: GlobalInducingGuide, tensors: dict[str, Tensor], prefix: str) -> Json:
    if guide.inducing_inputs is None:
        raise ValueError(
            "`guide` must have its inducing points, but it takes them from the first batch. Fit the "
            "guide, or call `guide.initialize(...)` with the model's arguments, first."
        )
    found = _description(guide, guide.families, tensors, prefix)
    for name in ("inducing_inputs", *OF_GLOBAL_INDUCING):
        found[name] = _encode(getattr(guide, name), tensors, f"{prefix}.{name}")
    return found


@_describe.register
def _(guide: MixtureGuide, tensors: dict[str, Tensor], prefix: str) -> Json:
    members = [
        _describe(member, tensors, f"{prefix}.{number}")
        for number, member in enumerate(guide.members)
    ]
    return {"class": _class_of(guide), "vectorize": guide.vectorize, "members": members}


def _description(
    guide: StructuredGuide, families: Mapping[str, Family], tensors: dict[str, Tensor], prefix: str
) -> Json:
    if guide.create_plates is not None:
        raise TypeError(
            "`guide` must have no `create_plates`, a function that no file holds. Save "
            "`guide.state_dict()` by `torch.save`."
        )
    return {
        "class": _class_of(guide),
        "families": {
            pattern: _encode(family, tensors, f"{prefix}.{pattern}")
            for pattern, family in families.items()
        },
        "init_scale": float(guide.init_scale),
        "local_reparam": guide.local_reparam,
    }


def _class_of(guide: StructuredGuide) -> str:
    """Return the name of a class of this package, the nearest one for a class of the user's."""
    return next(kind.__name__ for kind in type(guide).__mro__ if kind in _kinds().values())


def _kinds() -> dict[str, type[StructuredGuide]]:
    """Return the guides of this package by name."""
    kinds: list[type[StructuredGuide]] = [StructuredGuide, *_subclasses(StructuredGuide)]
    return {each.__name__: each for each in kinds if each.__module__.startswith(f"{KEY}.")}


def _make(description: Json, model: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the guide that a header describes, at its initial parameters."""
    kind = _kinds().get(description["class"])
    if kind is None:
        raise ValueError(
            f"The guide of the file is a {description['class']}, which this version does not have. "
            "Make the guide and pass it as `guide=`."
        )
    made: Any = kind.__new__(kind)
    if issubclass(kind, MixtureGuide):
        rows = iter(description["members"])
        MixtureGuide.__init__(
            made,
            model,
            lambda model: _make(next(rows), model, tensors),
            len(description["members"]),
            vectorize=description["vectorize"],
        )
        return made
    families = {
        pattern: _decode(each, tensors) for pattern, each in description["families"].items()
    }
    options = {name: description[name] for name in ("init_scale", "local_reparam")}
    if issubclass(kind, GlobalInducingGuide):
        options |= {name: _decode(description[name], tensors) for name in OF_GLOBAL_INDUCING}
        inputs = _decode(description["inducing_inputs"], tensors)
        GlobalInducingGuide.__init__(made, model, inputs, families, **options)
    else:
        StructuredGuide.__init__(made, model, families, **options)
    if not made.site_names:
        raise ValueError(
            "`guide` must be given for a model that declares no site before it runs. Make the guide, "
            "call `guide.initialize(...)` with the model's arguments, and pass `guide=guide`."
        )
    return made


# ---- options -------------------------------------------------------------------------------------


def _encode(value: Any, tensors: dict[str, Tensor], prefix: str) -> Any:
    """Return an option as JSON; tensors are added under a prefix."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (Integral, Real)):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Tensor):
        tensors[prefix] = value.detach().clone(memory_format=torch.contiguous_format)
        return {"tensor": prefix}
    if isinstance(value, Family):
        options = {
            each.name: _encode(getattr(value, each.name), tensors, f"{prefix}.{each.name}")
            for each in fields(value)
        }
        return {"family": type(value).__name__, "options": options}
    if isinstance(value, Mapping):
        return {"mapping": {key: _encode(value[key], tensors, f"{prefix}.{key}") for key in value}}
    if isinstance(value, (list, tuple)):
        return {"list": [_encode(each, tensors, f"{prefix}.{i}") for i, each in enumerate(value)]}
    raise TypeError(
        f"`guide` must have options that a file can hold, but '{prefix}' is {brief(value)}. Save "
        "`guide.state_dict()` by `torch.save`."
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return an option from JSON.

    Raises:
        ValueError: If a family or one of its options is unknown.
    """
    match value:
        case {"tensor": key}:
            return tensors[key]
        case {"mapping": entries}:
            return {key: _decode(each, tensors) for key, each in entries.items()}
        case {"list": entries}:
            return tuple(_decode(each, tensors) for each in entries)
        case {"family": name, "options": options}:
            kinds = {kind.__name__: kind for kind in _subclasses(Family)}
            known = {each.name for each in fields(kinds[name])} if name in kinds else set()
            if name not in kinds or not options.keys() <= known:
                raise ValueError(
                    f"The file has the family {name}({', '.join(options)}), which is unknown here. "
                    "Import the module that defines it, or read the file with the version that wrote "
                    "it."
                )
            decoded = {key: _decode(each, tensors) for key, each in options.items()}
            return kinds[name](**decoded)
    return value


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
