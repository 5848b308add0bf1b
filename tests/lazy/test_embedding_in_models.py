"""Embeddings in models: training steps, particles, predictions."""

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.distributions import WeightDistribution
from pyro_structvi.weights.lazy import LazyWeight
from tests.guide_cases import GUIDES, POINTS
from tests.particle_noise import terms_in_a_loop, terms_together
from tests.unit_noise import assert_close

SERVED_GUIDES = ("mean field", "k-tied", "rowwise", "low rank")


class Bag(nn.Module):
    """Logits by the mean over tokens of what they are embedded as."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 3, padding_idx=0), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


def make_bags():
    """Return a classifier of bags of five tokens, whose class tells which tokens are likely."""
    y = torch.arange(16) % 2
    return ps.Classifier(ps.bayesianize(Bag(), prior=1.0), 16), (
        torch.randint(3, (16, 5)) + 3 * y.unsqueeze(-1),
        y,
    )


@pytest.mark.parametrize("name", [*GUIDES, *POINTS])
def test_a_training_step_draws_the_table_only_without_a_rule(name, monkeypatch):
    """And its gradient reaches every parameter."""
    model, data = make_bags()
    guide = (GUIDES | POINTS)[name](model)
    guide.initialize(*data)
    q = guide["net.embed.weight"]()
    drawn, draw = [], LazyWeight.draw
    monkeypatch.setattr(LazyWeight, "draw", lambda w: (drawn.append(w.use.name), draw(w))[1])
    (-ps.StructuredELBO().terms(model, guide, *data).elbo).backward()
    has_rule = name in {"points", "ensemble"} or type(q).rows is not WeightDistribution.rows
    assert has_rule or name not in SERVED_GUIDES
    assert drawn == ([] if has_rule else ["net.embed.weight"])
    for key, parameter in guide.named_parameters():
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.ne(0).any(), key


@pytest.mark.parametrize("local_reparam", [True, "exact"])
def test_particles_in_one_pass_have_the_terms_of_a_loop(local_reparam):
    model, data = make_bags()
    guide = ps.AutoLowRankLRT(model, init_scale=0.3, local_reparam=local_reparam)
    guide.initialize(*data)
    elbo = ps.StructuredELBO(num_particles=4, vectorize_particles=True)
    each = [terms(elbo, model, guide, *data).elbo for terms in (terms_together, terms_in_a_loop)]
    assert_close(*each)
