"""Classifiers for tables on the sets of scikit-learn: ours, points, and those of other packages.

    python -m benchmarks.classifiers --output FILE.csv
    python -m benchmarks.classifiers --data wine --method chains --method "logistic regression"
    python -m benchmarks.classifiers --quick      # to see that it runs

Each set is tested in five stratified folds. "chains", "points", "mixture" and "deep ensemble" are as in
``benchmarks.estimators``. Logistic regression has the penalty that predicts best within the training
data, and the forest 500 trees. What the file of results has is not measured again.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.rows import ResultsFile
from benchmarks.uci_tables import CLASSIFIERS, estimators_table
from pyro_structvi.sklearn import BayesianMLPClassifier

SETS = {
    "iris": load_iris,
    "wine": load_wine,
    "breast cancer": load_breast_cancer,
    "digits": load_digits,
}
QUICK = {"num_steps": 20, "num_sampling_steps": 40, "num_members": 2}
FOLDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=SETS, action="append", help="default: all")
    parser.add_argument("--method", choices=METHODS, action="append", help="default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = ResultsFile(options.output, CLASSIFIERS)
    for number, data in product(range(FOLDS), options.data or SETS):
        for method in options.method or METHODS:
            if not results.has(data, str(number), method):
                row = measure(data, number, METHODS[method](options.quick))
                results.add((data, str(number), method, *row))
    print(estimators_table(results.rows, CLASSIFIERS))


def measure(data: str, number: int, classifier: ClassifierMixin) -> tuple[str, ...]:
    """Return log likelihood, error rate in percent and seconds of a classifier on a fold."""
    x, y = SETS[data](return_X_y=True)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    train, test = list(folds.split(x, y))[number]
    start = time.perf_counter()
    classifier.fit(x[train], y[train])
    probabilities = classifier.predict_proba(x[test])
    seconds = time.perf_counter() - start
    found = classifier.classes_[probabilities.argmax(1)]
    error = 100 * (1 - accuracy_score(y[test], found))
    density = -log_loss(y[test], np.clip(probabilities, 1e-15, None), labels=classifier.classes_)
    return f"{density:.5g}", f"{error:.5g}", f"{seconds:.0f}"


def bayesian_mlp(*args: Any, **options: Any) -> Callable[[bool], ClassifierMixin]:
    """Return the maker of an estimator of ours, for a quick run or not."""

    def make(is_quick: bool) -> ClassifierMixin:
        own = options | (QUICK if is_quick else {})
        return BayesianMLPClassifier(*args, random_state=0, **own)

    return make


def logistic_regression(is_quick: bool) -> ClassifierMixin:
    own = LogisticRegressionCV(
        Cs=3 if is_quick else 10,
        l1_ratios=(0.0,),
        scoring="neg_log_loss",
        max_iter=1000,
        use_legacy_attributes=False,
    )
    return make_pipeline(StandardScaler(), own)


def forest(is_quick: bool) -> ClassifierMixin:
    return RandomForestClassifier(10 if is_quick else 500, random_state=0)


METHODS: dict[str, Callable[[bool], ClassifierMixin]] = {
    "chains": bayesian_mlp(refine=True),
    "chains, energy variance 0.02": bayesian_mlp(energy_variance=0.02),
    "points": bayesian_mlp(refine=False),
    "points, no skip": bayesian_mlp(refine=False, skip=False),
    "mixture": bayesian_mlp(posterior="mixture", refine=False),
    "mixture, no skip": bayesian_mlp(posterior="mixture", refine=False, skip=False),
    "mixture, KL weight 0.1, no skip": bayesian_mlp(
        posterior="mixture", refine=False, skip=False, kl_weight=0.1
    ),
    "deep ensemble": bayesian_mlp((50, 50), activation="relu", refine=False, skip=False),
    "logistic regression": logistic_regression,
    "random forest": forest,
}


if __name__ == "__main__":
    main()
