"""Every example runs in smoke size; none can be forgotten."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
# Commands, which run in a folder with the data that they name.
COMMANDS = """
examples/cifar_resnet.py --random-images 16 --epochs 1 --num-samples 2 --batch-size 8
examples/demo.py --smoke --output .
examples/lora.py --data reviews.npz --smoke
examples/papers/tomczak2020/images.py --data images.npz --smoke
examples/papers/tomczak2020/regressions.py --data regression.npz --smoke
examples/papers/tutorial/depth.py --smoke --figure covariances.png
examples/papers/tutorial/structures.py --smoke
examples/mnist.py --data images.npz --epochs 1 --num-samples 2
examples/papers/swiatkowski2020/cnn.py --data images.npz --dataset MNIST --smoke \\
    --output results.csv
examples/papers/swiatkowski2020/gradient_snr.py --data images.npz --smoke --gradients 2 \\
    --posterior "mean field" --posterior "k-tied, k = 2"
examples/papers/swiatkowski2020/lstm.py --data reviews.npz --smoke
examples/papers/swiatkowski2020/mlp.py --data images.npz --smoke --select
examples/papers/swiatkowski2020/step_times.py --rounds 2
examples/papers/ritter2021/regression.py --smoke --references . --figure figure.png
examples/papers/ritter2021/resnet.py --data images.npz --outside images.npz --smoke --augment \\
    --nets . --output results.csv
examples/papers/ritter2021/small_net.py --data images.npz --smoke
benchmarks/bench.py --net small --net lstm --rounds 2 --samples 2 --against pyro \\
    --output bench.json
benchmarks/convergence.py --problem linear --steps 30 --particles 20 --guide "k-tied 1" \\
    --recipe default --output convergence.json
benchmarks/figures.py --costs costs.svg --convergence convergence.svg
benchmarks/league.py --smoke --problem linear --problem cosine --references . \\
    --method "reference, again" --method "KTiedGuide(rank=1, join_bias=False)" --method MAPGuide \\
    --method "Pyro: AutoNormal" --output league.csv --figure league.svg
benchmarks/moments.py --smoke --output moments.csv
benchmarks/summary.py --output .
benchmarks/tables.py --output .
benchmarks/biases.py --problem cosine --guide k-tied --steps 5
benchmarks/decomposition.py --data regression.npz --steps 5 --map-steps 5 --chain-steps 20 \\
    --output decomposition.csv
benchmarks/active_learning.py --data regression.npz --method "mean field" --quick \\
    --output active.csv
benchmarks/adapter_draws.py --hidden 16 --layers 1 --batch 1 --length 4 --repeats 1
benchmarks/bayesian_optimization.py --problem Branin --method "matrix normal" --quick \\
    --output optimization.csv
benchmarks/deep_nets.py --data images.npz --net LeNet --epochs 1 --quick --foreign images.npz \\
    --method "AdamW, temperature scaling" --method "k-tied 2 from AdamW" --output deep_nets.csv
benchmarks/estimators.py --data regression.npz --splits 1 --quick --method points \\
    --method "Gaussian process" --output estimators.csv
benchmarks/classifiers.py --data iris --quick --method points --method "logistic regression" \\
    --output classifiers.csv
benchmarks/sampling.py --data regression.npz --map-steps 5 --steps 20 --samples 4 --chains 2 \\
    --output sampling.csv --nuts
benchmarks/scaling.py --sweep d --sweep S --largest 128 --rounds 2 --output scaling.json \\
    --figure scaling.svg
benchmarks/uci.py --data regression.npz --splits 1 --steps 20 --draws 10 --guide "k-tied, k = 2" \\
    --output uci.csv
benchmarks/uci_priors.py --data regression.npz --splits 1 --steps 20 --draws 10 --prior learned \\
    --prior 1 --guide "k-tied, k = 2" --noise 0.3 --output uci_priors.csv
docs/scripts/bands.py --steps 20 --draws 40 --warmup 20 --folder bands --references league \\
    --figure bands.svg
docs/scripts/gallery_figures.py --folder . --page write_your_own_family --page lora
docs/scripts/guide_pictures.py --folder . --overview all.svg --guide k-tied --steps 20 --nuts 5
docs/scripts/gradient_variance.py --gradients 2 --figure figure.png
docs/scripts/gradients_by_hand.py --net small --rounds 2
docs/scripts/inducing_layers.py --rounds 1 --draws 2
docs/scripts/is_it_any_good.py --folder . --steps 20
docs/scripts/kernel_costs.py --rounds 1 --size 64 --stages 1
docs/scripts/layer_cost.py --sizes 6x5 64x64 --rounds 2 --ranks 2
docs/scripts/local_shares.py --net BERT
docs/scripts/memory.py --net resnet18 --steps 1 --guide plain --guide "k-tied, k = 2"
docs/scripts/particles.py --rounds 2 --particles 2
docs/scripts/prediction_overhead.py --batches 32 --samples 1 2 --rounds 1
docs/scripts/walks.py
docs/scripts/traced_steps.py --rounds 2 --guide "k-tied, k = 2"
docs/scripts/step_profile.py --net small --steps 1 --top 2 --guide deterministic \\
    --guide "k-tied, k = 2"
"""
SCRIPTS = {
    script: arguments
    for script, *arguments in map(shlex.split, COMMANDS.replace("\\\n", "").strip().splitlines())
}
# What they need of the extra `nets`.
NEEDS = {
    "benchmarks/adapter_draws.py": ("transformers", "peft"),
    "benchmarks/bayesian_optimization.py": ("botorch",),
    "examples/lora.py": ("transformers", "peft"),
    "docs/scripts/local_shares.py": ("transformers",),
}


def test_no_script_is_missing():
    found = {
        str(path.relative_to(ROOT))
        for folder in ("examples", "benchmarks", "docs/scripts")
        for path in (ROOT / folder).rglob("*.py")
        if "__main__" in path.read_text()
    }
    assert found == set(SCRIPTS)


def save_regression(path):
    random = np.random.default_rng(0)
    order = np.stack([random.permutation(60) for _ in range(2)])
    x, y = random.normal(size=(60, 3)), random.normal(size=60)
    np.savez(path, x=x, y=y, train_idx=order[:, :50], test_idx=order[:, 50:])


def save_reviews(path):
    random, parts = np.random.default_rng(0), {}
    for part in ("train", "test"):
        lengths = random.integers(5, 30, 200)
        parts |= {
            f"tokens_{part}": random.integers(2, 600, lengths.sum()).astype(np.int32),
            f"offsets_{part}": np.concatenate([[0], lengths.cumsum()]),
            f"y_{part}": np.arange(200) % 2,
        }
    np.savez(path, **parts)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs(script, tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (64, 28, 28), dtype=np.uint8)
    classes = np.arange(64) % 10
    np.savez(
        tmp_path / "images.npz", x_train=images, y_train=classes, x_test=images, y_test=classes
    )
    for library in NEEDS.get(script, ()):
        pytest.importorskip(library)
    save_reviews(tmp_path / "reviews.npz")
    save_regression(tmp_path / "regression.npz")
    result = subprocess.run(
        [sys.executable, ROOT / script, *SCRIPTS[script]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    guides = "k-tied|KTiedGuide|low rank|inducing|local|mean field|matrix normal|FFG-U"
    assert re.search(f"{guides}|family|chains|points|adapters", result.stdout)
