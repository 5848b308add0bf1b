"""The time of ten draws of adapters on a small, random Llama, over a pass of the net with adapters.

python -m benchmarks.adapter_draws  # after `make .venv/installed-nets`
python -m benchmarks.adapter_draws --hidden 64 --layers 2 --repeats 1  # to see that it runs
"""

import argparse
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import pyro_structvi as ps
from benchmarks.markdown import markdown

DRAWS = 10
WORDS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    columns = {}
    for layers in ([*range(options.layers)], [options.layers - 1]):
        for batch in options.batch:
            where = "all layers" if len(layers) > 1 else "the last layer"
            columns[f"{where}, {batch} x {options.length} tokens"] = times(options, layers, batch)
    ways = next(iter(columns.values()))
    rows = [[way, *(f"{own[way]:.2g}" for own in columns.values())] for way in ways]
    print(markdown(["adapters on", *columns], rows))


def times(options: argparse.Namespace, layers: list[int], batch: int) -> dict[str, float]:
    """Return the times of ten draws over the time of one pass, by the way to compute them."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from pyro_structvi.transformers import draws_as_adapters

    torch.manual_seed(0)
    hidden = options.hidden
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=WORDS, num_hidden_layers=options.layers, **sizes)
    targets = {"r": 8, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": layers}
    base = LlamaForCausalLM(config).to(options.device).eval()
    net = get_peft_model(base, LoraConfig(**targets, task_type="CAUSAL_LM")).eval()
    model = ps.TokenClassifier(ps.bayesianize(net, prior=0.1), batch, shift=True)
    guide = ps.MeanFieldGuide(model)
    ids = torch.randint(3, WORDS, (batch, options.length), device=options.device)
    draws = guide.joint_posterior().draw_many(range(DRAWS))
    nets = [guide.to_net({k: v[i] for k, v in draws.items()}).eval() for i in range(DRAWS)]
    functions, adapters = guide.sample_functions(DRAWS), draws_as_adapters(guide, DRAWS)
    names = [f"draw{number}" for number in range(DRAWS) for _ in range(batch)]
    rows = ids.repeat(DRAWS, 1)
    ways: dict[str, Callable[[], Any]] = {
        "one pass": lambda: net(ids, use_cache=False),
        "ten nets in turn": lambda: [each(ids, use_cache=False) for each in nets],
        "`sample_functions(10)`": lambda: functions(ids, use_cache=False),
        "`draws_as_adapters(10)`": lambda: adapters(rows, use_cache=False, adapter_names=names),
        "`predict(num_samples=10)`": lambda: ps.predict(
            model, guide, {"input_ids": ids}, num_samples=DRAWS, stream=True, max_memory=1.0
        ),
        "one net on ten times the batch": lambda: net(rows, use_cache=False),
    }
    with torch.no_grad():  # ways take turns, so that the load of a round is the same for all
        rounds = [{way: seconds(run) for way, run in ways.items()} for _ in range(options.repeats)]
    return {way: median(own[way] / own["one pass"] for own in rounds) for way in ways}


def seconds(run: Callable[[], Any]) -> float:
    """Return the shortest time of three runs."""
    found = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)


if __name__ == "__main__":
    main()
