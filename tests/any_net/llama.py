"""A small, random Llama with adapters, and texts."""

import torch

import pyro_structvi as ps

WORDS, LENGTH, SIZE = 40, 8, 12


def base(layers=2):
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(
        vocab_size=WORDS, num_hidden_layers=layers, max_position_embeddings=64, **sizes, **ends
    )
    return transformers.LlamaForCausalLM(config).eval()


def adapters(net):
    import peft

    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,  # random, so that the adapters change the net
    )
    return peft.get_peft_model(net, config).eval()


def make(guide=ps.MeanFieldGuide, net=None, **options):
    net = net or adapters(base())
    model = ps.TokenClassifier(ps.bayesianize(net, prior=0.3), shift=True)
    return model, guide(model, **{"init_scale": 0.3} | options)


def texts(size=SIZE):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.randint(3, WORDS, (size, LENGTH))


def inputs(size=SIZE):
    ids = texts(size)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def rows(size=SIZE, hidden=0):
    """Return a data set of texts as their own labels; the first ones have fewer labels."""
    found = []
    for number, ids in enumerate(texts(size)):
        labels = ids.clone()
        labels[: hidden * (number % 3)] = -100
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found
