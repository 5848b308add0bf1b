"""A warning of a posterior that the KL has pulled back to the prior."""

from itertools import accumulate

from pyro_structvi._checks import warn_user
from pyro_structvi.infer.history import History

WINDOWS = 20  # of a fit, over each of which the terms of the bound are averaged
LEAST = 10  # steps in a window, fewer of which are too noisy to compare


def warn_of_ignored_data(history: History) -> None:
    """Warn where the KL's rise cost more log likelihood than what is kept, and than the KL that is left.

    The steps under a small weight are a short maximum-likelihood fit. A posterior of a model that fits
    loses about half a nat of its expected log likelihood for each direction that the data determine, and
    pays more KL than that for it. A fit of noise is lost too, and rightly, but not most of what was
    learned since the start. So a posterior that lost more than both has given up the fit.
    """
    rises = sum(weight < history.kl_weight[-1] for weight in history.kl_weight)
    size = len(history.elbo) // WINDOWS
    if size < LEAST or rises < size:
        return
    sums = [0.0, *accumulate(history.log_likelihood)]
    best = max((sums[end] - sums[end - size]) / size for end in range(size, rises + 1))
    last = (sums[-1] - sums[-1 - size]) / size
    kl = sum(history.kl[-size:]) / size
    if best - last > max(kl, last - sums[1]) and kl > 0:
        warn_user(
            f"The expected log likelihood ends at {last:.4g} nats, and was {best:.4g} while the weight "
            f"of the KL rose. The loss is above the KL of {kl:.4g}: the posterior ignores most of the "
            "data. Take a guide whose layers depend on each other (`GlobalInducingGuide`), more steps, "
            "another prior or a smaller `kl_weight`.",
            UserWarning,
        )
