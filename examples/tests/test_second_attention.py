"""The example of a new second attention: whom its meta-tokens see in each kind of pass, pair by pair, and its use."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.second_attention import NEAR, NearTextConfig, NearTextModel
from metatokens import set_text_window
from metatokens.analysis.observation import observe
from metatokens.checkpoint import load_model
from metatokens.errors import UserError
from tests.model.test_visibility import (
    AT_ONCE,
    IN_PIECES,
    IS_META,
    LENGTH,
    SINKS,
    WINDOW,
    Pass,
    fixed,
    seen,
)
from tests.model.tiny_models import META, random_rows, randomize, tiny_config

PASSES = AT_ONCE | IN_PIECES


def config(**fields: Any) -> NearTextConfig:
    """A small configuration."""
    return NearTextConfig.from_dict(
        tiny_config(**fields).to_dict() | {"model_type": "near_text_gpt2"}
    )


@pytest.fixture(scope="module")
def model() -> NearTextModel:
    """A random model of one block, in which causal attention adds nothing."""
    model = NearTextModel(config(num_hidden_layers=1, bias=False)).double().eval()
    randomize(model)
    torch.nn.init.zeros_(model.model.layers[0].attention.out_proj.weight)
    return model


def sees(case: Pass, query: int, key: int, window: int | None) -> bool:
    """The rule: a meta-token sees meta-tokens and the last tokens, of those that causal attention shows it."""
    if not IS_META[query] or not case.sees(query, key, window):
        return False
    shown_since = [later for later in range(key, query + 1) if case.sees(query, later, window)]
    return IS_META[key] or len(shown_since) <= NEAR


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("name", PASSES)
def test_whom_a_meta_token_sees(model: NearTextModel, name: str, window: int | None) -> None:
    case = PASSES[name]
    set_text_window(model, window, SINKS)
    is_refused = case.cache is fixed or len(case.sequences) > 1
    if is_refused and window is not None:
        with pytest.raises(UserError, match="a text_window"):
            seen(model, case)
        return
    is_seen = seen(model, case)
    for query in range(LENGTH):
        if query in case.padding:
            continue
        for key in range(LENGTH):
            expected = query == key or sees(case, query, key, window)
            assert bool(is_seen[query, key]) == expected, f"query {query}, key {key}"


def test_it_trains_generates_and_is_saved(tmp_path: Path) -> None:
    model = NearTextModel(config())
    ids = torch.tensor(random_rows([20, 20]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]

    model.eval().save_pretrained(tmp_path)
    again = NearTextModel.from_pretrained(tmp_path).eval()
    options = {"max_new_tokens": 10, "do_sample": False, "meta_every": 3}
    generated = model.generate(ids[:1], **options)
    assert torch.equal(again.generate(ids[:1], **options), generated)
    # No other class takes the weights for its own.
    with pytest.raises(UserError, match="near_text_gpt2"):
        load_model(tmp_path)
    without_cache = copy.deepcopy(model).generate(ids[:1], use_cache=False, **options)
    assert torch.equal(generated, without_cache)
    assert (ids[0] == META).any()


def test_continuous_batching_is_refused() -> None:
    model = NearTextModel(config(eos_token_id=0)).eval()
    with pytest.raises(UserError, match="no second attention of this kind"):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)


def test_its_attention_is_not_observed() -> None:
    model = NearTextModel(config()).eval()
    with pytest.raises(
        UserError, match="a second attention that needs all rows cannot be observed"
    ):
        observe(model, torch.tensor(random_rows([20])[0]))
