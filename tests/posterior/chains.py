"""Draws of two chains, and the groups of the inference data that are made of them."""

import torch

GROUPS = {"posterior", "posterior_predictive", "log_likelihood", "observed_data"}


class Chains(dict):
    """Draws of two chains, as NUTS returns them."""

    num_chains = 2


def chains_of(guide, count=6):
    each = [guide.draw() for _ in range(count)]
    return Chains({name: torch.stack([d[name] for d in each]) for name in guide.site_names})


def groups_of(data):
    return set(data.groups()) if callable(data.groups) else set(data.children)
