"""The k-tied paper's MLP on MNIST: scores, spectra, and compression after training.

    python -m examples.papers.swiatkowski2020.mlp --seeds 3 --output results.csv
    python -m examples.papers.swiatkowski2020.mlp --select --output results.csv  # prior 0.2 or 0.3
    python -m examples.papers.swiatkowski2020.mlp --paper-size --seeds 3 --output results.csv

784-400-400-10; all weights are tied, biases are mean field. The last 10,000 images of the training part
are held out. MNIST is downloaded by torchvision, or read from ``--data FILE.npz`` with unsigned bytes
``x_train, y_train, x_test, y_test``.

References:
    Swiatkowski et al. (2020), "The k-tied Normal distribution", figures 2 and 4, table 2 and appendix A.
"""

import argparse
from collections import OrderedDict

from torch import nn

import pyro_structvi as ps
from examples.papers.data import load_images
from examples.papers.swiatkowski2020.experiment import (
    Experiment,
    experiment_parser,
    held_out,
    measure_all,
    parse,
)


def main() -> None:
    options = parse(experiment_parser(__doc__, steps=3000, batch_size=512, draws=50, seeds=3))
    measure_all(mnist_mlp(options), options)


def mnist_mlp(options: argparse.Namespace) -> Experiment:
    """Return the net and its data, for the options ``data``, ``limit`` and ``test_limit``."""
    images = load_images("MNIST", options.data, options.limit)
    flat = images._replace(x_train=images.x_train.flatten(1), x_test=images.x_test.flatten(1))
    parts = held_out(flat, 1 / 6, options.test_limit)
    return Experiment("MLP on MNIST", make_net, ps.Classifier, "*.weight", **parts)


def make_net() -> nn.Sequential:
    """Return the paper's net."""
    return nn.Sequential(
        OrderedDict(
            dense1=nn.Linear(784, 400),
            relu1=nn.ReLU(),
            dense2=nn.Linear(400, 400),
            relu2=nn.ReLU(),
            dense3=nn.Linear(400, 10),
        )
    )


if __name__ == "__main__":
    main()
