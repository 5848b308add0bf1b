"""Rules for moments, draws, densities and KL divergences of weights."""

from functools import partial

import torch
from torch.distributions import Independent, MultivariateNormal, Normal, StudentT, kl_divergence

from pyro_structvi.testing.noise import draw_with_noise
from pyro_structvi.testing.subject import Subject, scales_noise
from pyro_structvi.weights.weight_distribution import GaussianWeight, IndependentWeight


def check_moments(s: Subject) -> None:
    """Check moments against the distribution of draws."""
    q, close = s.q, s.contract.close
    variance = s.covariance.diagonal(dim1=-2, dim2=-1).reshape(s.mean.shape)
    close("`mean` is the mean of draws", q.mean, s.mean)
    close("`covariance_matrix` is the covariance of draws", q.covariance_matrix, s.covariance)
    close("`variance` is the diagonal of the covariance", q.variance, variance)
    close("`stddev` is the root of the variance", q.stddev, variance.sqrt(), False)
    trace = variance.flatten(-s.event_dim).sum(-1)
    close("`variance_sum` is the trace of the covariance", q.variance_sum, trace)
    off = s.covariance - torch.diag_embed(s.covariance.diagonal(dim1=-2, dim2=-1))
    is_diagonal = bool(off.abs().max() <= 1e-12 * s.covariance.abs().max())
    if isinstance(q, IndependentWeight):
        s.contract.equal("an `IndependentWeight` needs a diagonal covariance", is_diagonal, True)


def check_draws(s: Subject) -> None:
    """Check draws and their gradients."""
    q = s.q
    s.contract.equal("`rsample` has gradients", q.rsample().requires_grad, True)
    s.contract.equal("`sample` has no gradients", q.sample().requires_grad, False)
    s.check_draws("draws", q.rsample, s.mean, s.covariance)
    if s.is_normal and not q.batch_shape:
        several = s.covariance.expand(3, *s.covariance.shape)
        s.check_draws(
            "several draws", lambda: torch.cat([q.rsample((2,)), q.rsample((1,))]), s.mean, several
        )


def check_gaussian(s: Subject) -> None:
    """``scale_noise``, ``whiten``, ``mahalanobis`` and ``log_det_covariance``, if defined."""
    q, close = s.q, s.contract.close
    if not isinstance(q, GaussianWeight) or not s.is_normal:
        return
    log_det = torch.linalg.slogdet(s.covariance).logabsdet
    close("`log_det_covariance` is the log determinant", q.log_det_covariance, log_det)
    for sample_shape in ((), (5,), (5, 2)):
        away = torch.randn(*sample_shape, *s.mean.shape)
        flat = away.flatten(-s.event_dim)
        solved = torch.linalg.solve(s.covariance, flat.unsqueeze(-1)).squeeze(-1)
        distance = (flat * solved).sum(-1)
        close("`mahalanobis(d)` is d' Sigma^-1 d", q.mahalanobis(away), distance)
        if not scales_noise(q):
            continue
        noise = torch.randn(*sample_shape, *q.batch_shape, *q.noise_shape)
        scaled = q.scale_noise(noise)
        drawn, _ = draw_with_noise(partial(q.rsample, sample_shape), noise.flatten())
        close("`rsample` draws `loc + scale_noise(e)`", drawn, q.loc + scaled)
        if type(q).whiten is not GaussianWeight.whiten:
            close("`whiten` inverts `scale_noise`", q.whiten(scaled), noise, False)


def check_densities(s: Subject) -> None:
    """Check ``log_prob`` and ``entropy`` against the dense normal."""
    q, close = s.q, s.contract.close
    if not s.is_normal:
        return
    dense = s.dense()
    for sample_shape in ((), (5,)):
        value = torch.randn(*sample_shape, *s.mean.shape)
        expected = dense.log_prob(value.flatten(-s.event_dim))
        close("`log_prob` has the value of the dense normal", q.log_prob(value), expected)
    close("`entropy` has the value of the dense normal", q.entropy(), dense.entropy())
    if q._validate_args:
        wrong, nan = torch.zeros(*s.mean.shape, 2), torch.full(s.mean.shape, torch.nan)
        for kind, value, start in (
            ("another shape", wrong, "`value` must have shape"),
            ("NaN", nan, "`value` holds"),
        ):
            s.contract.refuses(f"`log_prob` refuses {kind}", partial(q.log_prob, value), start)


def check_kl(s: Subject) -> None:
    """Check KL divergences from independent normals with all forms of their arguments."""
    q, shape, batch = s.q, s.mean.shape, len(s.q.batch_shape)
    if not s.is_normal:
        return
    one, loc, scale = torch.ones(shape), torch.randn(shape), torch.rand(shape) + 0.5
    of_weight = scale.flatten(batch)[..., 0].reshape(*q.batch_shape, *(1 for _ in q.event_shape))
    of_rows = of_weight
    if s.event_dim > 1:
        of_rows = scale[(0,) * batch].flatten(1)[:, 0].reshape(-1, *(1 for _ in q.event_shape[1:]))
    priors: dict[str, Normal] = {
        "of one scale": Normal(torch.tensor(0.3), 0.7),
        "with a mean": Normal(loc, scale),
        "of one scale for each weight": Normal(0 * of_weight, of_weight),
        "of one scale for each output": Normal(0 * of_rows, of_rows),
    }
    for name, prior_of in priors.items():
        plain = prior_of.expand(shape)
        prior_loc, prior_scale = one * prior_of.mean, one * prior_of.stddev
        if s.oracle.kl is not None:
            expected = s.oracle.kl(q, prior_loc, prior_scale)
        else:
            covariance = torch.diag_embed(prior_scale.flatten(-s.event_dim).square())
            dense = MultivariateNormal(prior_loc.flatten(-s.event_dim), covariance)
            expected = kl_divergence(s.dense(), dense)
        rule = f"`kl_divergence(q, p)` is E_q[log q - log p], for a normal p {name}"
        for prior in (Independent(plain, s.event_dim), plain):
            s.contract.close(rule, kl_divergence(q, prior), expected)
    whole = Independent(Normal(loc[(0,) * batch], scale[(0,) * batch]), s.event_dim)
    found = kl_divergence(q, whole)
    expected = kl_divergence(q, whole.expand(q.batch_shape))
    s.contract.close("one prior serves a batch of weights", found, expected)
    if isinstance(q, GaussianWeight):
        for prior in (StudentT(3.0, one, 1.0), Independent(StudentT(3.0, one, 1.0), s.event_dim)):
            try:
                kl_divergence(q, prior)
            except NotImplementedError:
                continue
            s.contract.fail("a KL without closed form is refused", NotImplementedError, "a value")
