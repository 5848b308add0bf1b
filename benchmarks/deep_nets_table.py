"""The table of deep nets, of a file of results."""

from benchmarks.markdown import markdown
from benchmarks.rows import Row, mean_with_error

DEEP_NETS = ("net", "recipe", "method", "seed", "accuracy", "NLL", "seconds")


def deep_nets_table(rows: list[Row]) -> str:
    """Return a table of each net and recipe, with means and standard errors over seeds."""
    parts = []
    for net, recipe in dict.fromkeys(row[:2] for row in rows):
        own = [row for row in rows if row[:2] == (net, recipe)]
        cells = []
        for method in dict.fromkeys(row[2] for row in own):
            runs = [row[4:] for row in own if row[2] == method]
            accuracy, loss, seconds = ([float(run[i]) for run in runs] for i in range(3))
            cells.append([
                method,
                mean_with_error((100 * value for value in accuracy), "{:.2f}".format),
                mean_with_error(loss, "{:.3f}".format),
                mean_with_error(seconds, "{:.0f}".format),
            ])
        head = ["method", "accuracy, %", "negative log likelihood", "seconds"]
        parts.append(f"### {net}, {recipe}\n\n{markdown(head, cells)}")
    return "\n\n".join(parts)
