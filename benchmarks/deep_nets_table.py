"""Tables of deep nets, of a file of results."""

from statistics import fmean

from benchmarks.markdown import markdown
from benchmarks.rows import Row, mean_with_error

DEEP_NETS = ("net", "recipe", "method", "seed", "accuracy", "NLL", "seconds", "AUROC")

# Methods with one part of the recipe changed.
CHANGES = {
    "none": "mean field, {kl}, {scale}",
    "the whole KL": "mean field, whole KL, {scale}",
    "the prior N(0, 1)": "mean field, prior N(0, 1), {kl}, {scale}",
    "one sample of the weights for a batch": "mean field, sampled weights, {kl}, {scale}",
    "torch's Adam at a rate of 0.001": "mean field, torch's Adam, {kl}, {scale}",
    "the initial scale 0.2": "mean field, {kl}, initial scale 0.2",
}
RECIPES = {
    ("MLP", "60000 images, 10 epochs"): {"kl": "KL weight 0.02", "scale": "initial scale 0.02"},
    ("LSTM", "5000 texts, 10 epochs"): {"kl": "KL weight 0.1", "scale": "initial scale 0.05"},
}


def deep_nets_tables(rows: list[Row]) -> str:
    """Return the tables of all methods and of changes to the recipe."""
    changed = {_key(net, change) for net in RECIPES for change in CHANGES if change != "none"}
    others = [row for row in rows if row[:3] not in changed]
    title = "Mean field, with one part of the recipe changed; accuracy in % and negative log likelihood:"
    return "\n\n".join([_all_methods(others), title, _changes(rows)])


def _key(net: tuple[str, str], change: str) -> Row:
    return (*net, CHANGES[change].format(**RECIPES[net]))


def _changes(rows: list[Row]) -> str:
    body = []
    for change in CHANGES:
        cells = []
        for net in RECIPES:
            runs = [row[4:] for row in rows if row[:3] == _key(net, change)]
            accuracy = mean_with_error((100 * float(run[0]) for run in runs), "{:.2f}".format)
            loss = mean_with_error((float(run[1]) for run in runs), "{:.3f}".format)
            cells.append(f"{accuracy}; {loss}" if runs else "")
        body.append([change, *cells])
    return markdown(["change", *(f"{net}, {recipe}" for net, recipe in RECIPES)], body)


def _all_methods(rows: list[Row]) -> str:
    """Return the table of all nets and recipes, with means and standard errors over seeds."""
    body, last = [], ()
    for net, recipe, method in dict.fromkeys(row[:3] for row in rows):
        runs = [row[4:] for row in rows if row[:3] == (net, recipe, method)]
        accuracy, loss, seconds = ([float(run[i]) for run in runs] for i in range(3))
        detection = [float(run[3]) for run in runs if run[3]]
        body.append([
            "" if (net, recipe) == last else f"{net}, {recipe}",
            method,
            mean_with_error((100 * value for value in accuracy), "{:.2f}".format),
            mean_with_error(loss, "{:.3f}".format),
            mean_with_error(detection, "{:.3f}".format),
            f"{fmean(seconds):.0f}",
        ])
        last = (net, recipe)
    head = ["net", "method", "accuracy, %", "negative log likelihood", "AUROC", "seconds"]
    return markdown(head, body)
