"""The table of Bayesian optimization, of a file of results."""

from statistics import median

from benchmarks.markdown import markdown
from benchmarks.rows import Row, mean_with_error

OPTIMIZATION = ("problem", "method", "trial", "regret", "seconds of a fit")


def optimization_table(rows: list[Row]) -> str:
    """Return mean regrets of each method on each problem, with standard errors, and median seconds."""
    problems = list(dict.fromkeys(row[0] for row in rows))
    cells = []
    for method in dict.fromkeys(row[1] for row in rows):
        own = [row for row in rows if row[1] == method]
        regrets = [
            mean_with_error((float(row[3]) for row in own if row[0] == name), "{:.2f}".format)
            for name in problems
        ]
        cells.append([
            method,
            *regrets,
            f"{median(float(row[4]) for row in own):.1f}",
        ])
    trials = min(len([row for row in rows if row[:2] == key]) for key in {row[:2] for row in rows})
    head = ["method", *problems, "seconds of a fit, median"]
    return f"At least {trials} trials of each.\n\n{markdown(head, cells)}"
