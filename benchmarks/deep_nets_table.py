"""The table of deep nets, of a file of results."""

from statistics import fmean

from benchmarks.markdown import markdown
from benchmarks.rows import Row, mean_with_error

DEEP_NETS = ("net", "recipe", "method", "seed", "accuracy", "NLL", "seconds", "AUROC")


def deep_nets_table(rows: list[Row]) -> str:
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
