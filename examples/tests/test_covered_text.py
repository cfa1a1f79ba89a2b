"""The test of covered text in results/: which edges a cut removes, and the words of its rule."""

import pytest
import torch

from metatokens import MetaGPT2Config, MetaGPT2ForCausalLM
from results.covered_text.cuts import (
    DOCUMENT,
    LANDMARK,
    MARKERS,
    QUESTION,
    QUESTION_MARKER,
    Cut,
    View,
    cutting,
)
from results.seeds import Mean

KINDS = torch.tensor([[DOCUMENT, LANDMARK, QUESTION, QUESTION_MARKER]])


def test_a_cut_removes_the_named_edges_and_no_token_from_itself() -> None:
    named = Cut("", "first", (LANDMARK,), (DOCUMENT, LANDMARK)).kept(KINDS)[0]
    others = Cut("", "first", MARKERS, MARKERS, others=True).kept(KINDS)[0]

    assert (~named).nonzero().tolist() == [[1, 0]]
    assert others.nonzero().tolist() == [[0, 0], [1, 1], [1, 3], [2, 2], [3, 1], [3, 3]]


def test_a_cut_changes_the_queries_that_lose_an_edge_and_later_ones_alone() -> None:
    config = MetaGPT2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, meta_token_id=63
    )
    torch.manual_seed(0)
    model = MetaGPT2ForCausalLM(config).eval()
    view = View.__new__(View)  # without a tokenizer, which only finds the question
    view.kinds = KINDS
    ids = torch.tensor([[5, 63, 7, 63]])
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    cut = Cut("", "second", (QUESTION_MARKER,), (LANDMARK,))

    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
        with cutting(model, view, cut, layers=[0]):
            without = model(ids, attention_mask=mask).logits
        again = model(ids, attention_mask=mask).logits

    assert torch.equal(plain[:, :3], without[:, :3])
    assert not torch.allclose(plain[:, 3], without[:, 3])
    assert torch.equal(plain, again)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.5, 0.6, 0.7, 0.5, 0.6, 0.7], "lead"),
        ([0.01, 0.02, 0.01, 0.02, 0.01, 0.02], "within 5 points"),
        ([-0.2, -0.1, -0.2, -0.1, -0.2, -0.1], "no lead of 5 points"),
        ([-0.9, 0.9, -0.9, 0.9, -0.9, 0.9], "cannot be told"),
        ([0.5, 0.6, 0.7, 0.5, 0.6], "cannot be told"),
    ],
)
def test_the_words_of_the_rule(differences: list[float], verdict: str) -> None:
    assert Mean.of(differences, (0.0, 0.05, -0.05)).verdict == verdict
