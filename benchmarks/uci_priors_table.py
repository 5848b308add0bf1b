"""Table of priors and noise of UCI regressions: learned ones beside a grid of fixed ones."""

from collections.abc import Iterable
from statistics import fmean

from benchmarks.markdown import markdown
from benchmarks.rows import Row
from benchmarks.uci_tables import HETEROSCEDASTIC, decimals, standard_error, written

HEADER = (
    *("data", "split", "guide", "prior", "noise", "annealed"),
    *("log likelihood", "RMSE", "ELBO", "seconds"),
)
LEARNED = "learned"
DIVERGED = 1e6  # nats of a bound that no run comes to which trains
Setting = tuple[str, str, str]  # prior, noise, annealed


def priors_tables(rows: Iterable[Row]) -> str:
    """Return a table for each guide and for heteroscedastic noise and that of one number."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        kind = "heteroscedastic noise" if row[4] == HETEROSCEDASTIC else "one noise scale"
        groups.setdefault(f"{row[2]}, {kind}", []).append(row)
    return "\n\n".join(one_table(title, own) for title, own in groups.items())


def one_table(title: str, rows: list[Row]) -> str:
    sets = list(dict.fromkeys(row[0] for row in rows))
    settings: dict[Setting, None] = dict.fromkeys((row[3], row[4], row[5]) for row in rows)
    body = [[label(each), *(cell(rows, name, each) for name in sets)] for each in settings]
    table = markdown(["log likelihood; RMSE; ELBO", *sets], body)
    numbers = ", ".join(f"{name} {len({r[1] for r in rows if r[0] == name})}" for name in sets)
    lines = [line for name in sets if (line := distance_from_best(rows, name))]
    return "\n\n".join([f"### Held out: {title}", table, f"Splits: {numbers}.", *lines])


def learned_table(rows: Iterable[Row]) -> str:
    """Return differences in log likelihood: what is learned less the best fixed value, and annealing."""
    rows = list(rows)
    sets = list(dict.fromkeys(row[0] for row in rows))
    body = []
    for guide, noise in dict.fromkeys((row[2], row[4] == HETEROSCEDASTIC) for row in rows):
        own = [r for r in rows if (r[2], r[4] == HETEROSCEDASTIC) == (guide, noise)]
        what = "prior's scale" if noise else "noise"
        learned = [best_difference(own, name) for name in sets]
        annealed = [annealing_difference(own, name) for name in sets]
        body += [[f"{guide}: learned {what} less the best fixed", *learned]] if any(learned) else []
        body += [[f"{guide}: KL annealed less not", *annealed]] if any(annealed) else []
    return markdown(["difference in log likelihood", *sets], body)


def best_difference(rows: list[Row], name: str) -> str:
    found = learned_and_best(rows, name)
    return f"{written(found[1], 2, '+')} ({fixed_value(found[0])})" if found else ""


def fixed_value(setting: Setting) -> str:
    """Return the number that a setting fixes."""
    prior, noise, _ = setting
    return prior if prior != LEARNED else noise


def annealing_difference(rows: list[Row], name: str) -> str:
    """Return by how much the KL's annealing changes the log likelihood of what is learned."""
    settings = dict.fromkeys((r[3], r[4], r[5]) for r in rows if r[0] == name)
    own: dict[bool, dict[str, float]] = {}
    for each in settings:
        if set(each[:2]) <= {LEARNED, HETEROSCEDASTIC}:
            own[float(each[2]) > 0] = values_of(rows, name, each, "log likelihood")
    if set(own) != {True, False}:
        return ""
    shared = own[True].keys() & own[False].keys()
    return written([own[True][s] - own[False][s] for s in sorted(shared)], 2, "+")


def label(setting: Setting) -> str:
    """Return the name of a row: its prior scale, the noise where that is one number, and annealing."""
    prior, noise, annealed = setting
    of_noise = "" if noise == HETEROSCEDASTIC else f", noise {noise}"
    return f"prior {prior}{of_noise}{'' if float(annealed) else ', KL not annealed'}"


def values_of(rows: list[Row], name: str, setting: Setting, quantity: str) -> dict[str, float]:
    """Return the values of a set and a setting by split."""
    column = HEADER.index(quantity)
    own = [row for row in rows if row[0] == name and row[3:6] == setting]
    return {row[1]: float(row[column]) for row in own}


def cell(rows: list[Row], name: str, setting: Setting) -> str:
    """Return means over splits with standard errors, or nothing where there is none."""
    densities, errors, bounds = (
        list(values_of(rows, name, setting, quantity).values()) for quantity in HEADER[6:9]
    )
    if not densities:
        return ""
    error = written(errors, decimals(fmean(errors)))
    has_diverged = abs(fmean(bounds)) > DIVERGED
    bound = f"{fmean(bounds):.1g} (diverged)" if has_diverged else written(bounds, 0)
    return f"{written(densities, 2)}; {error}; {bound}"


def distance_from_best(rows: list[Row], name: str) -> str:
    """Return a line on the learned value and the best fixed value, of splits that both have."""
    found = learned_and_best(rows, name)
    if not found:
        return ""
    best, differences = found
    is_near = fmean(differences) + 2 * standard_error(differences) >= 0
    return (
        f"{name}: the learned value is {'' if is_near else 'not '}within two standard errors of the "
        f"best fixed value ({label(best)}) or above it: {written(differences, 2, '+')}, paired by split."
    )


def learned_and_best(rows: list[Row], name: str) -> tuple[Setting, list[float]] | None:
    """Return the best fixed setting, and by how much the learned one is better on each split."""
    settings: list[Setting] = [(r[3], r[4], r[5]) for r in rows if r[0] == name and float(r[5])]
    own = next((each for each in settings if set(each[:2]) <= {LEARNED, HETEROSCEDASTIC}), None)
    if own is None:
        return None
    learned = values_of(rows, name, own, "log likelihood")
    grid = {
        each: found
        for each in dict.fromkeys(settings)
        if each != own
        and (found := values_of(rows, name, each, "log likelihood")).keys() >= learned.keys()
    }
    if len(learned) < 2 or not grid:
        return None
    best = max(grid, key=lambda each: fmean(grid[each][split] for split in learned))
    return best, [value - grid[best][split] for split, value in learned.items()]
