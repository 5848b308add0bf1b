"""Training by the ``Trainer`` of transformers, and draws of a posterior as adapters of peft."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

try:
    from peft import PeftModel
    from transformers import (
        GenerationConfig,
        LogitsProcessor,
        LogitsProcessorList,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
except ImportError as error:
    raise ImportError(
        'transformers and peft are needed: `pip install "pyro-structvi[transformers]"`.'
    ) from error

from pyro_structvi._checks import Count, brief, checked
from pyro_structvi._pyro import unwrapped
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.infer.data_warnings import set_num_data, warn_of_first_batch
from pyro_structvi.infer.elbo import StructuredELBO
from pyro_structvi.infer.training import Weight, check_in_modules, make_optimizer, objective_of
from pyro_structvi.infer.validation import same_randomness
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.nn.random_module import frozen_keys
from pyro_structvi.posterior import predict
from pyro_structvi.sites.sampled_net import has_members

__all__ = ["StructuredTrainer", "draws_as_adapters", "generate_from_mixture"]

NUM_DRAWS = 10  # in evaluation, and as adapters
IGNORED = -100  # the label of padding in transformers
# Arguments of the optimizer and the loss that Trainer makes.
UNUSED = (
    "optim",
    "optim_args",
    "optim_target_modules",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "label_smoothing_factor",
    "neftune_noise_alpha",
)
UNUSED_OPTIONS = ("compute_loss_func", "optimizer_cls_and_kwargs")
OF_SAMPLES: tuple[str, ...] = ("do_sample", "logits_processor")
WARPING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)


class StructuredTrainer(Trainer):
    r"""The ``Trainer`` of transformers for the evidence lower bound.

    A mini-batch is a dict with ``labels``, and the rest is the net's input. The loss is minus the bound
    in nats per label, for a language model per token. With the examples B and the labels T of a step,

    .. math:: \frac{1}{|T|} \sum_{n \in B} \Big( -\mathrm{E}_q[\log p(y_n \mid x_n, W)]
        + \frac{w}{N} \mathrm{KL}(q \| p) \Big),

    so each of N training examples has an equal share of the KL, and accumulated gradients equal the
    gradient of one large batch. Processes have separate noise. Logs have ``kl``, in nats, and
    ``kl_weight``. A bound or a gradient that is not finite stops the training before the parameters
    change.

    ``eval_loss`` is minus the log predictive density per label of a mini-batch, and as for any Trainer
    the mean over mini-batches counts their examples, not labels. Its noise is the same each time, and
    changes no training. ``compute_metrics`` has the predictive mean: probabilities, of ``labels[:, 1:]``
    where ``shift=True``. Checkpoints have the state of the guide and of the model, without frozen
    parameters.

    Args:
        model: The model.
        guide: The guide. Call ``guide.initialize(inputs, labels)`` where the model has to run before its
            sites are known, and give a :class:`~pyro_structvi.GlobalInducingGuide` its points.
        args: The arguments of training. ``learning_rate``, usually 0.01 to 0.1, is the rate of
            :class:`~pyro_structvi.StructuredAdam`, unless ``optimizers`` are given.
        kl_weight: The weight w of the KL, as in :func:`~pyro_structvi.fit`: "annealed" rises to 1 over
            the first half of the steps.
        num_samples: Draws of the posterior in evaluation; each member of an ensemble of points, or 10
            draws, when None.
        **options: Further arguments of ``Trainer``, such as ``train_dataset``.

    Raises:
        ValueError: If one process has several GPUs, the ``ignore_index`` of the model is not -100, or an
            argument is of another loss or optimizer, such as ``weight_decay``. In training, if the guide
            lacks parameters or the model reads one by ``pyro.param``.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize
        >>> class Net(nn.Linear):
        ...     def forward(self, pixels):
        ...         return super().forward(pixels)
        >>> model = Classifier(bayesianize(Net(3, 2)))
        >>> data = [{"pixels": torch.randn(3), "labels": n % 2} for n in range(16)]
        >>> quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
        >>> with TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
        ...     args = TrainingArguments(folder, max_steps=20, learning_rate=0.05, **quiet)
        ...     trainer = StructuredTrainer(model, MeanFieldGuide(model), args, train_dataset=data)
        ...     result = trainer.train()
        {'train_runtime': ...}
    """

    optimizer: Any

    @checked
    def __init__(
        self,
        model: Likelihood,
        guide: StructuredGuide,
        args: TrainingArguments,
        *,
        kl_weight: Weight = "annealed",
        num_samples: Count | None = None,
        **options: Any,
    ) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"`args` must have one GPU for each process, but got {args.n_gpu}. Start the program "
                "by `torchrun`, or set CUDA_VISIBLE_DEVICES."
            )
        if (ignored := getattr(model, "ignore_index", IGNORED)) != IGNORED:
            raise ValueError(
                f"`model` must have `ignore_index={IGNORED}`, by which the Trainer counts labels, but "
                f"got {ignored}. Write `labels.masked_fill(padding, {IGNORED})`, and leave "
                "`ignore_index` out."
            )
        known = [each for each in fields(TrainingArguments) if each.name in UNUSED]
        unused = [each.name for each in known if getattr(args, each.name) != each.default]
        unused += [name for name in UNUSED_OPTIONS if options.get(name) is not None]
        if unused:
            raise ValueError(
                f"A trainer of the bound uses none of {unused}: the loss is the bound, its prior takes "
                "the place of a decay of weights, and the optimizer is StructuredAdam. Leave them out, "
                "or pass another optimizer by `optimizers=(optimizer, schedule)`."
            )
        self._kl_weight, self._is_checked = kl_weight, False
        super().__init__(_Bound(model, guide, num_samples), args, **options)
        if self.accelerator.scaler is None:  # one leaves out such steps
            self.add_callback(_FiniteGradients)

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer, and the schedule of the KL over the steps of the run."""
        bound, total = self.model, self.state.max_steps
        try:
            bound.guide.joint_posterior()
        except RuntimeError as error:
            raise ValueError(
                "`guide` must have its parameters before the Trainer makes the optimizer, but is not "
                "initialized. Call `guide.initialize(inputs, labels)` with a mini-batch, or write "
                "`GlobalInducingGuide(model, points)` with some inputs of the net."
            ) from error
        size = len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None
        set_num_data(bound.model, bound.guide, size)
        bound.elbo = objective_of(None, self._kl_weight, total)
        if self.args.world_size > 1:  # processes whose generators have one seed
            torch.manual_seed(torch.initial_seed() + self.args.process_index)
        if self.optimizer is None:
            trained = [value for value in bound.parameters() if value.requires_grad]
            rate = self.args.learning_rate
            self.optimizer = make_optimizer(None, bound.guide, trained, rate, total)
        return super().create_optimizer(model)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a mini-batch, with the weight of the KL at this step."""
        bound = self.model
        bound.elbo.step = self.state.global_step
        if model.training and not self._is_checked:
            net_inputs = dict(inputs)
            labels = net_inputs.pop("labels", None)
            parts = bound.model, bound.guide
            check_in_modules(parts, (net_inputs, labels), {})
            warn_of_first_batch(parts, (net_inputs, labels), {}, 1, bound.model.num_data)
            self._is_checked = True
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        own = [dict(batch) for batch in batch_samples]
        for batch in own:
            if isinstance(labels := batch.get("labels"), Tensor):
                batch["labels"] = _as_counted(labels)
        return super()._get_num_items_in_batch(own, device)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Return an evaluation, by the same noise each time and without a change of the training."""
        with same_randomness(self.args.device):
            return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any) -> None:
        """Log the KL and its weight beside the loss."""
        if "loss" in logs:
            logs |= {"kl": float(self.model.kl), "kl_weight": self.model.elbo.current_kl_weight}
        super().log(logs, *args)

    def _set_signature_columns_if_needed(self) -> None:
        names = signature(self.model.net.forward).parameters
        self._signature_columns = [*names, "labels", "label", "label_ids"]


class _Bound(nn.Module):
    """Model and guide as a module of transformers: from a mini-batch to its loss."""

    def __init__(self, model: Likelihood, guide: StructuredGuide, num_samples: int | None) -> None:
        super().__init__()
        self.model, self.guide, self.num_samples = model, guide, num_samples
        self.elbo, self.kl = StructuredELBO(), torch.tensor(0.0)
        self.shifts = getattr(model, "shift", False)
        self.loss_type = "ForCausalLM" if self.shifts else None  # by which Trainer counts labels
        self.register_state_dict_post_hook(_leave_frozen_out)
        self.register_load_state_dict_post_hook(_need_no_frozen)

    @property
    def net(self) -> Any:
        """The net with the names of inputs: inside of a net of peft, which may have none."""
        base = getattr(self.model.net, "get_base_model", None)
        return self.model.net if base is None else base()

    def activation_checkpointing_enable(self, **options: Any) -> None:
        self.net.activation_checkpointing_enable(**options)

    def forward(
        self, labels: Tensor | None = None, num_items_in_batch: Any = None, **inputs: Any
    ) -> dict[str, Tensor]:
        if labels is None:
            return {"mean": self._predict(inputs, None).mean}
        predicted = labels[..., 1:] if self.shifts else labels
        count = num_items_in_batch
        if count is None:
            count = _as_counted(predicted).ne(IGNORED).sum()
        if not self.training:
            found = self._predict(inputs, predicted)
            return {"loss": -found.log_density.sum() / count, "mean": found.mean}
        if not count:
            raise ValueError(
                f"A step must have labels to predict, but all of its labels are {IGNORED}, so its loss "
                "per label is undefined. Leave such examples out of `train_dataset`."
            )
        terms = self.elbo.terms(self.model, self.guide, inputs, labels)
        self.kl = torch.stack([*terms.kl.values()]).sum().detach()
        assert self.model.num_data is not None
        share = len(labels) / self.model.num_data
        bound = terms.weighted(self.elbo.current_kl_weight) * share
        if not bool(bound.isfinite()):  # Trainer would log other numbers
            raise _not_finite("The bound of a mini-batch is")
        return {"loss": -bound / count}

    def _predict(self, inputs: Any, y: Tensor | None) -> Any:
        number = self.num_samples or self.guide.num_points or NUM_DRAWS
        return predict(self.model, self.guide, inputs, num_samples=number, y=y, stream=True)


def _as_counted(labels: Tensor) -> Tensor:
    """Return labels of which the ignored ones alone are -100: a real number is none of them."""
    return torch.zeros_like(labels) if labels.is_floating_point() else labels


class _FiniteGradients(TrainerCallback):
    """Raises before parameters change by a gradient that is not finite."""

    def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **options: Any) -> None:
        gradients = [value.grad for value in model.parameters() if value.grad is not None]
        if gradients and not bool(get_total_norm(gradients).isfinite()):
            raise _not_finite("Gradients of a step are")


def _not_finite(subject: str) -> FloatingPointError:
    return FloatingPointError(
        f"{subject} not finite. A smaller `learning_rate`, or a smaller `init_scale` of the guide, may "
        "help."
    )


def _leave_frozen_out(bound: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    for key in frozen_keys(bound):
        state.pop(prefix + key, None)
    first: dict[int, str] = {}
    for key, value in state.items():
        if value.numel() and first.setdefault(value.data_ptr(), key) != key:
            state[key] = value.clone()  # tied ones, which safetensors refuse


def _need_no_frozen(bound: nn.Module, found: Any) -> None:
    frozen = frozen_keys(bound)
    found.missing_keys[:] = [key for key in found.missing_keys if key not in frozen]


# ---- draws as adapters ---------------------------------------------------------------------------


@checked
def draws_as_adapters(guide: StructuredGuide, num_draws: Count | None = None) -> PeftModel:
    """Return a net of peft with draws of a posterior as adapters on one base.

    The net is a copy in evaluation mode. Its active adapter has the posterior median, or for a mixture
    or an ensemble the first draw. The adapters "draw0", "draw1", ... are draws, of each member in turn,
    for ``set_adapter``, ``save_pretrained``, and for LoRA batches with ``adapter_names``.

    Args:
        guide: The guide of a likelihood around a net of peft.
        num_draws: The number of draws; each member of an ensemble of points, or 10 draws, when None.

    Raises:
        TypeError: If the model is no likelihood around a net of peft.
        ValueError: If the posterior has weights outside of the active adapter, or its layers are others
            than peft's.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize
        >>> net = get_peft_model(nn.Sequential(nn.Linear(3, 2)), LoraConfig(target_modules=["0"]))
        >>> guide = MeanFieldGuide(Classifier(bayesianize(net, prior=0.1), num_data=10))
        >>> list(draws_as_adapters(guide, 2).peft_config)
        ['default', 'draw0', 'draw1']
    """
    number = num_draws or guide.num_points or NUM_DRAWS
    draws = guide.joint_posterior().draw_many(range(number))
    first = {name: value[0] for name, value in draws.items()}
    is_mixture = guide.num_members > 1 or has_members(guide)
    net: Any = guide.to_net(first if is_mixture else None)
    if not isinstance(net, PeftModel) or not isinstance(unwrapped(guide.model), Likelihood):
        raise TypeError(
            "`guide` must be of a likelihood around a net of peft, but its model is "
            f"{brief(guide.model)} with the net {brief(net)}. Call `peft.get_peft_model(net, config)` "
            "before `bayesianize`, and pass its result to a `Classifier` or another likelihood."
        )
    active = net.active_adapter
    config, state = net.peft_config[active], net.state_dict()
    added = copy(config)
    if hasattr(added, "init_lora_weights"):
        added.init_lora_weights = True  # others, such as PiSSA's, change the base
    if hasattr(added, "layer_replication"):
        added.layer_replication = None  # each adapter would replicate the layers once more
    drawn = [name for name in state if f"net.{name}" in draws]
    own = [name for name in state if active in name.split(".")]
    outside = [name for name in drawn if name not in own]
    if outside:
        raise ValueError(
            f"`guide` must have a posterior over the adapter '{active}' only, but {outside} are outside "
            "of it, and adapters share them. Name their modules in `modules_to_save` of the config, or "
            "take a net for each draw, `guide.to_net(guide.draw())`."
        )
    for place in range(number):
        net.add_adapter(f"draw{place}", added)
        net.peft_config[f"draw{place}"] = config
        present = net.state_dict()
        # A tensor that layers share has several names, and its site has one of them.
        parts = {name: f".{name}.".rsplit(f".{active}.", 1) for name in own}
        names = {name: f".draw{place}.".join(parts[name]).strip(".") for name in own}
        unknown = [name for name in drawn if names[name] not in present]
        if unknown:
            raise ValueError(
                f"`guide` must have adapters of peft's own layers, but '{unknown[0]}' is of another. "
                "Leave its adapter out of `layers` of `bayesianize`, or take a net for each draw, "
                "`guide.to_net(guide.draw())`."
            )
        for name in own:
            if names[name] in present:
                present[names[name]].copy_(state[name])
        for name in drawn:
            present[names[name]].copy_(draws[f"net.{name}"][place])
    return net.requires_grad_(False).eval()


@checked
def generate_from_mixture(
    net: PeftModel,
    inputs: Mapping[str, Tensor],
    *,
    sample: bool = False,
    warpers: Sequence[LogitsProcessor] = (),
    **options: Any,
) -> Any:
    """Generate sequences, each token from the average of the probabilities of all draws.

    The draws are rows of one batch, each with its own cache.

    Args:
        net: The result of :func:`draws_as_adapters`.
        inputs: Arguments of ``generate`` with the sequences first: ``input_ids``, ``attention_mask``.
        sample: Whether to sample tokens, in place of the most probable ones or beams.
        warpers: Changes of the average, such as ``TemperatureLogitsWarper(0.7)``.
        **options: Further arguments of ``generate``, such as ``max_new_tokens`` and ``num_beams``, or a
            ``generation_config`` with these.

    Returns:
        Tokens ``(sequences, length)``; with ``return_dict_in_generate`` an object, with the rows of all
        draws.

    Raises:
        ValueError: If the net has no draws, or its kind of adapters has no batches with a name for each
            row, or if an option would change nothing.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pyro_structvi import MeanFieldGuide, TokenClassifier, bayesianize
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        >>> base = LlamaForCausalLM(LlamaConfig(vocab_size=20, num_attention_heads=2, **sizes))
        >>> net = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        >>> guide = MeanFieldGuide(TokenClassifier(bayesianize(net, prior=0.1), 10, shift=True))
        >>> inputs = {"input_ids": torch.ones(3, 4, dtype=torch.long)}
        >>> net = draws_as_adapters(guide, 2)
        >>> generate_from_mixture(net, inputs, max_new_tokens=2, min_new_tokens=2).shape
        torch.Size([3, 6])
    """
    draws = _draws_in(net)
    _check_generation(net, sample, options)
    if (beams := _setting(net, options, "num_beams")) > 1:
        options["num_beams"] = beams  # peft reads it here only
    size, count = len(next(iter(inputs.values()))), len(draws)
    rows = {name: value.repeat(count, *[1] * (value.dim() - 1)) for name, value in inputs.items()}
    processors = [*warpers, _SameNoise(count)] if sample else [*warpers]
    with net.get_base_model().register_forward_hook(partial(_average, count)):
        tokens = net.generate(
            **rows,
            **options,
            do_sample=False,
            adapter_names=[name for name in draws for _ in range(size)],
            logits_processor=LogitsProcessorList(processors),
        )
    return tokens[: len(tokens) // count] if isinstance(tokens, Tensor) else tokens


def _draws_in(net: Any) -> list[str]:
    """Return the names of the draws, each of which may have its own rows of a batch."""
    draws = [name for name in net.peft_config if name.startswith("draw")]
    if not draws:
        raise ValueError(
            "`net` must have draws as adapters, but has none. Pass `draws_as_adapters(guide)`."
        )
    # Without these hooks peft leaves the names out in silence.
    is_dora = getattr(net.peft_config[draws[0]], "use_dora", False)
    if is_dora or not hasattr(net.base_model, "_enable_peft_forward_hooks"):
        raise ValueError(
            "`net` must have adapters whose rows of a batch may have separate names, such as LoRA, but "
            f"has {'DoRA' if is_dora else net.peft_type.value}. Generate at each draw: "
            "`net.set_adapter('draw0')`."
        )
    if net.training:
        raise ValueError(
            "`net` must be in evaluation mode, but is in training. Write `net.eval()`."
        )
    return draws


def _setting(net: Any, options: dict[str, Any], name: str) -> Any:
    """Return a setting of ``generate``, a number: an option, of a given configuration, or the net's."""
    configs = options.get("generation_config"), getattr(net, "generation_config", None)
    found = [options.get(name), *(getattr(config, name, None) for config in configs)]
    return next((value for value in found if value is not None), 1)


def _check_generation(net: Any, sample: bool, options: dict[str, Any]) -> None:
    """Raise a ``ValueError`` if an option of ``generate`` would change nothing, or is of samples."""
    config, default = options.get("generation_config"), GenerationConfig()
    changed = [
        n for n in WARPING if getattr(config, n, None) not in (None, getattr(default, n, None))
    ]
    unused = [name for name in WARPING if name in options or name in changed]
    if unused:
        raise ValueError(
            f"`options` must have none of {unused}, which `generate` uses only where it samples itself. "
            "Write `warpers=[TemperatureLogitsWarper(0.7)]`, or another warper of transformers."
        )
    own = [name for name in OF_SAMPLES if name in options]
    if getattr(config, "do_sample", None):
        own.append("generation_config")
    if own:
        raise ValueError(
            f"`options` must have none of {own}, since tokens are sampled here, from the average. Write "
            "`sample=True`, and changes of the average as `warpers`."
        )
    for name, remedy in (
        ("num_beams", "Write `sample=False` for beams"),
        ("num_return_sequences", "Repeat the rows of `inputs`"),
    ):
        if sample and (number := _setting(net, options, name)) > 1:
            raise ValueError(
                f"`{name}` must be 1 where tokens are sampled, but got {number}. {remedy}."
            )


def _average(count: int, module: nn.Module, args: Any, output: Any) -> Any:
    """Give the rows of all draws the log of the average of their probabilities."""
    each = output.logits.float().log_softmax(-1).unflatten(0, (count, -1))
    output.logits = (each.logsumexp(0) - math.log(count)).repeat(count, 1, 1)
    return output


class _SameNoise(LogitsProcessor):
    """Gumbel noise, with which the most probable token is a sample, the same for all draws."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = scores.new_empty(len(scores) // self.count, scores.shape[-1]).exponential_()
        return scores - noise.log().repeat(self.count, 1)
