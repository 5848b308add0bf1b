"""Rules for the outputs of layers with random weights."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_structvi.maps import DenseMap
from pyro_structvi.testing.layers import Layer, layers_for
from pyro_structvi.testing.noise import draw_with_noise
from pyro_structvi.testing.subject import Subject
from pyro_structvi.weights.weight_distribution import FactoredWeight


def _check_output_density(s: Subject, name: str, image: Any, mean: Tensor, cov: Tensor) -> None:
    """Compare density and entropy of outputs with the dense normal."""
    batch = len(image.batch_shape)
    y = torch.randn(mean.shape)
    dense = MultivariateNormal(mean.flatten(batch), cov)
    rule, expected = "of {} has the value of the dense normal", dense.log_prob(y.flatten(batch))
    s.contract.close(f"`log_prob` {rule.format(name)}", image.log_prob(y), expected)
    s.contract.close(f"`entropy` {rule.format(name)}", image.entropy(), dense.entropy())


def check_image(s: Subject) -> None:
    """Check ``image`` against the dense distribution of W x."""
    q, contract = s.q, s.contract
    matrix, covariance = s.matrices
    out, size = matrix.shape[-2:]
    ones = tuple(1 for _ in q.batch_shape)
    for lead in ((2, *ones), (2, *q.batch_shape)) if ones else ((), (3,)):
        x = torch.randn(*lead, size).requires_grad_()
        mean = (matrix * x.unsqueeze(-2)).sum(-1)
        of_outputs = torch.einsum("...iajb,...a,...b->...ij", covariance, x, x)
        image = q.image(x)
        shapes = image.batch_shape + image.event_shape, image.event_shape
        contract.equal("`image(x)` has the event (out,)", shapes, (mean.shape, torch.Size([out])))
        contract.close("`image(x)` has the mean of W x", image.mean, mean)
        diagonal = of_outputs.diagonal(dim1=-2, dim2=-1)
        contract.close("`image(x)` has the variance of W x", image.variance, diagonal)
        contract.close("`image(x)` has the covariance of W x", image.covariance_matrix, of_outputs)
        if s.is_normal:
            _check_output_density(s, "`image(x)`", image, mean, of_outputs)
    draw = lambda: q.image(x).rsample()  # noqa: E731
    s.check_draws("draws of `image(x)`", draw, mean, of_outputs)
    if not ones and s.is_normal:
        several = of_outputs.expand(2, *of_outputs.shape)
        name = "several draws of `image(x)`"
        s.check_draws(name, lambda: q.image(x).rsample((2,)), mean, several)
    for sample_shape in ((5,), (2, 5)):
        got = tuple(image.rsample(torch.Size(sample_shape)).shape)
        contract.equal("draws of `image(x)` have their shape", got, (*sample_shape, *mean.shape))
    zero = torch.zeros_like(x).requires_grad_()
    inputs = [zero, *(leaf.value for leaf in contract.leaves)]
    drawn = q.image(zero).rsample()
    found = torch.autograd.grad(drawn.sum(), inputs, retain_graph=True, materialize_grads=True)
    finite = all(bool(gradient.isfinite().all()) for gradient in found)
    contract.equal("`image` of zeros has finite gradients", finite, True)
    contract.close("`image` of zeros is zero", drawn / 1e6, torch.zeros_like(drawn), False)
    rule, start = "`image` refuses", f"`x` must have shape (*batch, in) with in = {size}"
    wrong = torch.zeros(7, size + 1)
    contract.refuses(f"{rule} an input of another size", lambda: q.image(wrong), start)
    start = "`x` must have the dtype of"
    contract.refuses(f"{rule} another dtype", lambda: q.image(x.float()), start)


def check_spread(s: Subject) -> None:
    """Check ``spread`` against the dense covariance."""
    if s.q.batch_shape:
        return
    _, covariance = s.matrices
    for batch in ((), (3,)):
        root = torch.randn(*batch, covariance.shape[-1], covariance.shape[-1])
        root[..., 0] = 0  # without an inverse
        moment = root @ root.mT
        expected = torch.einsum("iajb,...ab->...ij", covariance, moment)
        s.contract.close("`spread(S)` is E[(W - M) S (W - M)']", s.q.spread(moment), expected)


def check_rows(s: Subject) -> None:
    """Check the moments of ``rows``, if defined."""
    if s.q.batch_shape or s.event_dim != 2:
        return
    index = torch.tensor([[0, s.q.event_shape[0] - 1, 0]])
    rows = s.q.rows(index)
    if rows is None:
        return
    s.contract.close("`rows(index)` has the means of the rows", rows.mean, s.mean[index])
    variance = s.covariance.diagonal().reshape(s.mean.shape)[index]
    s.contract.close("`rows(index)` has the variances of the rows", rows.variance, variance)


def check_layers(s: Subject) -> None:
    """Check the outputs of all layers for the shape of the weight."""
    if not s.q.batch_shape:
        for layer in layers_for(tuple(s.q.event_shape)):
            _check_layer(s, layer)
        return
    matrix, covariance = s.matrices
    x = torch.randn(2, *(1 for _ in s.q.batch_shape), matrix.shape[-1])
    image = s.q.image_under(DenseMap(), x)
    expected = torch.einsum("...iajb,...a,...b->...ij", covariance, x, x)
    rule = "weights of a batch have independent outputs under a layer, without positions"
    s.contract.close(rule, image.covariance_matrix, expected)


def _check_layer(s: Subject, layer: Layer) -> None:
    """Check moments, density and draws of a layer's outputs, in each way that the weight offers."""
    q, contract, name = s.q, s.contract, layer.name
    matrix, _ = s.matrices
    x = torch.randn(layer.x_shape).requires_grad_()
    bias, bias_leaves = layer.make_bias(len(matrix))
    linear_map, seen = layer.of_weight(q, x)
    ways = q.ways_to_apply(linear_map, seen)
    contract.equal(f"`ways_to_apply` offers a drawn weight to {name}", "weight" in ways, True)
    moments = layer.moments(matrix, s.covariance, x, bias_leaves)
    plain = layer.moments(matrix, s.covariance, x, [])
    diagonal = plain.covariance.diagonal(dim1=-2, dim2=-1).reshape(plain.mean.shape)
    found = q.image_variance(linear_map, seen, plain.mean)
    contract.close(f"`image_variance` is the variance of {name}", found, diagonal)
    if s.is_normal and isinstance(q, FactoredWeight) and linear_map.groups == 1:
        _, size = draw_with_noise(q.rsample, None)
        noise = torch.randn(size)
        weight, _ = draw_with_noise(q.rsample, noise)
        applied, _ = draw_with_noise(lambda: q.draw_factored().apply(linear_map, seen), noise)
        expected = linear_map(seen, q.as_matrix(weight))
        contract.close(f"`draw_factored` applies one draw in {name}", applied, expected)
    if "outputs" not in ways:
        return
    image = q.image_under(linear_map, seen, bias)
    found_shape = image.batch_shape + image.event_shape
    contract.equal(f"the outputs of {name} have their shape", found_shape, moments.mean.shape)
    shared = None if s.oracle.shared_covariance is None else s.oracle.shared_covariance(q)
    covariance = moments.expected(q.has_exact_positions, shared, image.covariance_matrix)
    contract.close(f"outputs of {name} have their mean", image.mean, moments.mean)
    variance = covariance.diagonal(dim1=-2, dim2=-1).reshape(moments.mean.shape)
    contract.close(f"outputs of {name} have their variance", image.variance, variance)
    contract.close(f"outputs of {name} have their covariance", image.covariance_matrix, covariance)
    if s.is_normal:
        _check_output_density(s, f"outputs of {name}", image, moments.mean, covariance)
    draw = lambda: q.image_under(*layer.of_weight(q, x), bias).rsample()  # noqa: E731
    s.check_draws(f"drawn outputs of {name}", draw, moments.mean, covariance)
