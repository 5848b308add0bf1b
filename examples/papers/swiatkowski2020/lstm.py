"""The k-tied paper's LSTM on film reviews: scores, spectra, and compression after training.

    python -m examples.papers.swiatkowski2020.lstm --data aclImdb --output results.csv
    python -m examples.papers.swiatkowski2020.lstm --data FILE.npz --output results.csv
    python -m examples.papers.swiatkowski2020.lstm --data aclImdb --paper-size --output results.csv

The 10,000 most frequent words, an embedding and an LSTM cell of 128 units, and one unit at the last
word, which has the paper's numbers of parameters but for torch's second bias of the cell. The cell's
two kernels are tied, embedding and last layer are mean field, and biases are points, as in the paper.
It does not say how long its reviews are; here the last 80 words of each are read. The last fifth of
the training reviews, in an order of their own, is held out.

The reviews are from https://ai.stanford.edu/~amaas/data/sentiment/: unpack ``aclImdb_v1.tar.gz`` and
give the folder. ``examples/papers/reviews.py`` says what an ``.npz`` file has in its place.

References:
    Maas et al. (2011), "Learning word vectors for sentiment analysis"; Swiatkowski et al. (2020), "The
    k-tied Normal distribution", figures 2 and 4, table 2 and appendix A.
"""

from functools import partial

from torch import Tensor, nn

import pyro_structvi as ps
from examples.papers.reviews import load_reviews
from examples.papers.swiatkowski2020.experiment import (
    Experiment,
    experiment_parser,
    held_out,
    measure_all,
    parse,
)
from pyro_structvi.families import PointEstimate


def main() -> None:
    sizes = {"steps": 1000, "batch_size": 64, "draws": 10, "test_limit": 2500}
    parser = experiment_parser(__doc__, **sizes)
    parser.add_argument(
        "--vocabulary", type=int, default=10_000, help="words, the rare ones left out"
    )
    parser.add_argument("--length", type=int, default=80, help="words of a review, the last ones")
    options = parse(parser)
    if options.data is None:
        parser.error(
            "--data must be the folder aclImdb, or an .npz file; see the top of this script."
        )
    reviews = load_reviews(options.data, options.vocabulary, options.length, options.limit)
    experiment = Experiment(
        title="LSTM on IMDB",
        make_net=partial(Sentiment, options.vocabulary),
        likelihood=ps.BinaryClassifier,
        tied="*lstm.weight*",
        others={"*bias*": PointEstimate()},
        **held_out(reviews, 1 / 5, options.test_limit),
    )
    measure_all(experiment, options)


class Sentiment(nn.Module):
    """The logit that a review is positive.

    Args:
        vocabulary: How many words there are.
        size: Of the embedding and of the cell.
    """

    def __init__(self, vocabulary: int, size: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        nn.init.kaiming_normal_(self.embedding.weight)  # torch's N(0, 1) is far from the prior
        self.lstm = nn.LSTM(size, size, batch_first=True)
        self.dense = nn.Linear(size, 1)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits ``(N,)`` for words ``(N, length)``."""
        outputs, _ = self.lstm(self.embedding(words))
        logits: Tensor = self.dense(outputs[:, -1]).squeeze(-1)
        return logits


if __name__ == "__main__":
    main()
