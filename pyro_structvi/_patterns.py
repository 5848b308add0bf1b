"""How a pattern names sites and parameters."""

from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern is the name itself, or matches it with wildcards as in a shell."""
    return name == pattern or fnmatchcase(name, pattern)
