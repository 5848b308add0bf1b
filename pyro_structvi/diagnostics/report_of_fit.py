"""What a report says of a fit itself: parameters, the bound, importance weights, gradients, spectra."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi.diagnostics.gradient_noise import gradient_snr
from pyro_structvi.diagnostics.importance import pareto_k
from pyro_structvi.diagnostics.report_data import Fitted
from pyro_structvi.diagnostics.report_page import Part, Section, Table, make_ax, picture
from pyro_structvi.diagnostics.spectra import Spectrum, spectra
from pyro_structvi.infer import StructuredELBO
from pyro_structvi.infer.history import History
from pyro_structvi.plots import plot_elbo, plot_scale_matrix, plot_spectrum
from pyro_structvi.posterior.element_scores import marginal_variances
from pyro_structvi.posterior.runs import evaluation_mode
from pyro_structvi.sites.report import GuideReport

PARTICLES = 10  # of the bound
GRADIENTS = 100
LAYERS = 8  # at most, in a figure
LARGEST = 2**20  # elements of a matrix that is drawn

OF_PARAMETERS = (
    "One row for each parameter of the model: whether it is random, which family its posterior has, "
    "what an ELBO draws of it and why, and the standard deviations of prior and posterior. Where the "
    "posterior's is near the prior's, the data have told little about that parameter."
)
OF_BOUND = (
    "The bound is the expected log likelihood minus the KL divergences. A site whose KL is near zero "
    "has its prior for its posterior; the largest ones are where the guide spends its nats. The trace "
    "of a fit that is done is flat at its end."
)
OF_WEIGHTS = (
    "Below 0.5 the guide is close to the posterior of all weights together, and up to 0.7 averages "
    "under the posterior can still be had from many draws. Above 0.7, as nearly always in a net of many "
    "weights, the bound by importance weights and the effective sample size are not to be trusted; "
    "predictions may be good all the same."
)
OF_GRADIENTS = (
    "E[g]² / Var[g] over independent gradients at the present parameters: well above 1 a step knows "
    f"the sign of the gradient, and about {1 / GRADIENTS:g} is zero as far as can be told, as at the "
    "optimum; it is infinite where a gradient does not vary. Compare guides at the same stage of "
    "training."
)
OF_SPECTRA = (
    "Where few components explain nearly all of the standard deviations, a k-tied posterior of that "
    "rank loses little. Means usually need many."
)


def parameters(fitted: Fitted, report: GuideReport) -> Section:
    """Return the section of what was fitted."""
    head = ("name", "shape", "state", "posterior", "drawn", "why", "prior", "scale", "parameters")
    rows = [astuple(each) for each in report.parameters]
    parts: list[Part] = [
        _counts(fitted, report),
        Table("Parameters of the model", head, rows),
    ]
    return Section("What was fitted", OF_PARAMETERS, parts)


def _counts(fitted: Fitted, report: GuideReport) -> Table:
    def elements(state: str) -> int:
        shapes = [each.shape for each in report.parameters if each.state == state]
        return sum(torch.Size(shape).numel() for shape in shapes)

    trained = sum(each.numel() for each in fitted.guide.parameters() if each.requires_grad)
    rows: list[tuple[str, Any]] = [
        ("training examples", len(fitted.train.y)),
        ("test examples", 0 if fitted.test is None else len(fitted.test.y)),
        ("random elements of the model", elements("random")),
        ("share of them of which outputs or rows are drawn", report.local_share),
        ("elements with a point for their posterior", elements("point")),
        ("elements trained without a prior", elements("trained")),
        ("frozen elements", elements("frozen")),
        ("numbers trained in the guide", trained),
    ]
    return Table("Numbers", ("what", "number"), [row for row in rows if row[1]])


def bound(fitted: Fitted, history: History | None) -> Section:
    """Return the section of the evidence lower bound, by its terms."""
    batch = fitted.train.some(fitted.batch_size)
    objective = StructuredELBO(num_particles=PARTICLES)
    with ONE_THREAD, evaluation_mode(fitted.model):
        terms = objective.terms(fitted.model, fitted.guide, *batch)
    total = sum(float(nats) for nats in terms.kl.values())
    likelihood = {f"log likelihood of {name}": float(v) for name, v in terms.log_likelihood.items()}
    sums = {"ELBO": float(terms.elbo), **likelihood, "KL divergence": total}
    kl = sorted(((name, float(nats)) for name, nats in terms.kl.items()), key=lambda row: -row[1])
    parts: list[Part] = [
        f"Averages over {PARTICLES} draws at {_words(fitted)}, in nats.",
        Table("Terms", ("term", "nats"), [*sums.items()]),
        Table("KL divergence by site", ("site", "nats"), kl),
    ]
    if terms.sampled:
        names = ", ".join(terms.sampled)
        parts.append(f"Estimated from draws, for want of a closed form: {names}.")
    if history is not None:
        caption = "The bound and the KL divergence over the steps of the fit, with running means."
        parts.append(picture(caption, plot_elbo(history, make_ax())))
    return Section("Evidence lower bound", OF_BOUND, parts)


def _words(fitted: Fitted) -> str:
    size, count = fitted.batch_size, len(fitted.train.y)
    if size is None or size >= count:
        return f"all {count:,} training examples"
    return f"{size:,} random training examples, with the weight that the model gives to a batch"


def importance(fitted: Fitted, num_samples: int) -> Section:
    """Return the section of importance weights, or why there are none."""
    title = "Distance to the posterior"
    if not num_samples:
        return Section(title, OF_WEIGHTS, ["Left out, by `importance_samples=0`."])
    data = fitted.train
    try:
        found = pareto_k(fitted.model, fitted.guide, *data.args, data.y, num_samples=num_samples)
    except ValueError as error:
        return Section(title, OF_WEIGHTS, [f"Left out: {error}"])
    rows = [
        ("Pareto k-hat", found.k_hat),
        ("ELBO (nats)", found.elbo),
        ("importance-weighted bound (nats)", found.importance_weighted_bound),
        ("effective sample size", found.effective_sample_size),
    ]
    table = Table(f"Importance weights of {num_samples:,} draws", ("what", "value"), rows)
    return Section(title, OF_WEIGHTS, [table])


def gradients(fitted: Fitted) -> Section:
    """Return the section of gradients' signal-to-noise ratios."""
    title, note = "Noise of gradients", f"{GRADIENTS} gradients at {_words(fitted)}."
    batch = fitted.train.some(fitted.batch_size)
    try:
        noise = gradient_snr(fitted.model, fitted.guide, *batch, num_samples=GRADIENTS)
    except ValueError as error:
        return Section(title, OF_GRADIENTS, [f"Left out: {error}"])
    rows = [(name, each.snr, each.median_snr) for name, each in noise.items()]
    head = ("parameter of the guide", "mean", "median")
    return Section(title, OF_GRADIENTS, [note, Table("Signal-to-noise ratios", head, rows)])


def spectra_of_layers(fitted: Fitted) -> Section:
    """Return the section of singular values of means and standard deviations."""
    title = "Spectra of the posterior"
    try:
        found, variances = spectra(fitted.guide), marginal_variances(fitted.guide)
    except (
        ValueError,
        RuntimeError,
    ) as error:  # no matrices; weights with a joint distribution only
        return Section(title, OF_SPECTRA, [f"Left out: {error}"])
    scales = {name: variances[name].sqrt().flatten(1) for name in found}
    return Section(title, OF_SPECTRA, [_shares(found), *_curves(found), *_matrix(scales)])


def _shares(found: dict[str, Spectrum]) -> Table:
    def explained(own: Spectrum) -> list[float]:
        shares = (own.scale_share, own.mean_share)
        return [float(share[:rank].sum()) for share in shares for rank in (1, 2)]

    columns = [f"{what}, rank {rank}" for what in ("scales", "means") for rank in (1, 2)]
    rows = [(name, len(own.mean), *explained(own)) for name, own in found.items()]
    title = "Share of the sum of squares that low ranks explain"
    return Table(title, ("weight", "full rank", *columns), rows)


def _curves(found: dict[str, Spectrum]) -> Iterator[Part]:
    for attribute, words in (("scale", "standard deviations"), ("mean", "means")):
        values = {name: getattr(own, attribute) for name, own in found.items()}
        values = {name: own for name, own in values.items() if own[0] > 0 and len(own) > 1}
        if not values:
            yield f"The figure of the {words} is left out: they are zero, or of one row or column."
            continue
        caption = f"Share of the {words}' sum of squares that each component explains."
        if len(values) > LAYERS:
            caption += f" The {LAYERS} weights with the most singular values."
        largest = sorted(values, key=lambda name: -len(values[name]))[:LAYERS]
        shown = {name: own for name, own in values.items() if name in largest}
        yield picture(caption, plot_spectrum(shown, make_ax(), "explained variance"))


def _matrix(scales: dict[str, Tensor]) -> Sequence[Part]:
    """Return the figure of the largest matrix of standard deviations that can be shown."""
    shown = {
        name: scale
        for name, scale in scales.items()
        if min(scale.shape) > 1 and scale.numel() <= LARGEST and bool((scale > 0).all())
    }
    if not shown:
        return [
            "The figure of a matrix of standard deviations is left out: it needs a weight with at "
            f"least two rows and columns and at most {LARGEST:,} elements, all of them with a variance."
        ]
    name = max(shown, key=lambda each: shown[each].numel())
    panels = plot_scale_matrix(shown[name], ranks=(1, 2))
    return [picture(f"Standard deviations of {name}, and their approximations.", panels[0], True)]
