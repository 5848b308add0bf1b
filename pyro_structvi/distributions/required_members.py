"""The check that a class defines what the contract of its base requires."""

from collections.abc import Mapping


def check_required_members(
    cls: type, contract: tuple[type, ...], required: Mapping[str, tuple[str, ...]]
) -> None:
    """Raise a ``TypeError`` that names the members which a class must define and does not.

    Args:
        cls: The class.
        contract: The bases that state it, the most specific one first.
        required: Each required member, with what may be overridden in its place: a member of the
            contract, or several of them with spaces between.

    Raises:
        TypeError: If a member is missing.
    """
    order = cls.__mro__
    own = order[: order.index(contract[0])]

    def is_overridden(name: str) -> bool:
        return any(name in vars(base) for base in own)

    missing = [
        name
        for name, others in required.items()
        if not any(all(map(is_overridden, way.split())) for way in (name, *others))
    ]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise TypeError(f"{cls.__name__} must define {names}; see `{contract[0].__name__}`.")
