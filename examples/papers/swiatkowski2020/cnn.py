"""The k-tied paper's LeNet: scores, spectra, and compression after training.

    python -m examples.papers.swiatkowski2020.cnn --output results.csv
    python -m examples.papers.swiatkowski2020.cnn --dataset CIFAR10 --data FILE.npz --output results.csv
    python -m examples.papers.swiatkowski2020.cnn --paper-size --output results.csv  # on a GPU

Two convolutions of 5 x 5 with 32 and 64 filters, each with a pooling by 2, and dense layers of 512 units
and the classes, which has the paper's numbers of parameters. The dense layers' weights are tied, and the
rest is mean field. Convolutions have drawn weights, as all weights in the paper; dense layers have
local reparameterization. The last fifth of the training part is held out. The paper's CIFAR-100 is
downloaded by torchvision; ``--data`` is a file as for the MLP.

References:
    Swiatkowski et al. (2020), "The k-tied Normal distribution", figures 2 and 4, table 2 and appendix A.
"""

from collections import OrderedDict
from functools import partial

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
    sizes = {"steps": 3000, "batch_size": 64, "draws": 10, "test_limit": 2000}
    parser = experiment_parser(__doc__, **sizes)
    parser.add_argument("--dataset", choices=["CIFAR100", "CIFAR10", "MNIST"], default="CIFAR100")
    options = parse(parser)
    images = load_images(options.dataset, options.data, options.limit)
    experiment = Experiment(
        title=f"CNN on {options.dataset}",
        make_net=partial(make_net, tuple(images.x_train.shape[1:]), int(images.y_train.max()) + 1),
        likelihood=ps.Classifier,
        tied="*dense?.weight",
        local_reparam="exact",
        **held_out(images, 1 / 5, options.test_limit),
    )
    measure_all(experiment, options)


def make_net(shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Return the LeNet for images ``(channels, height, width)``."""
    channels, height, width = shape
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 5, padding="same"),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5, padding="same"),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            dense1=nn.Linear(64 * (height // 4) * (width // 4), 512),
            relu3=nn.ReLU(),
            dense2=nn.Linear(512, classes),
        )
    )


if __name__ == "__main__":
    main()
