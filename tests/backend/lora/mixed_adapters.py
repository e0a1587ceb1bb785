"""Adapters of a tiny model, and answers with and without these adapters at the same time."""

import dataclasses

from backend.exactness import PARAMS, PROMPTS, reference
from backend.lora.adapter_writer import linear_layers, write_adapter

NAMES = ("", "wide", "narrow")


def answer_mixed(engine, names=NAMES, *, check_blocks=True):
    """Answer each prompt with each adapter, all at the same time.

    If `check_blocks` is true, check after each step that all used blocks belong to requests.

    Returns:
        A dict from the name of each adapter to the tokens of its answers, one for each prompt.
    """
    for index, prompt in enumerate(PROMPTS):
        for name in names:
            params = dataclasses.replace(PARAMS, lora_name=name)
            engine.add_request(f"{index} {name}", prompt, params)

    answers = {}
    while engine.has_work():
        for update in engine.step():
            assert update.error is None
            answers.setdefault(update.request_id, []).extend(update.new_token_ids)
        if check_blocks:
            engine.check()
    return [[answers[f"{index} {name}"] for index in range(len(PROMPTS))] for name in names]


def write_both(folder, model):
    """Write two adapters with different ranks and layers.

    Returns:
        The model without an adapter, and the model with the merged weights of each adapter.
    """
    layers = linear_layers(model)
    wide = write_adapter(folder / "wide", model, layers, rank=5, seed=1)
    narrow = write_adapter(folder / "narrow", model, layers[::2], rank=3, seed=2, use_rslora=True)
    return [model, wide, narrow]


def references(folder, models):
    """Return the greedy tokens of transformers for each model."""
    expected = []
    for number, model in enumerate(models):
        model.save_pretrained(folder / str(number))
        expected.append(reference(folder / str(number)))
    return expected


def adapters(folder):
    """Return a dict from the name of each adapter to its folder in `folder`."""
    return {name: str(folder / name) for name in NAMES if name}
