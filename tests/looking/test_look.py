"""What `look` finds in a model, recomputed in another way."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import metatokens
from metatokens import encode_prompt
from metatokens.checkpoint import load_model
from metatokens.data.tokenizer import META_TOKEN, load_tokenizer
from metatokens.looking.look import COVERED, DECOYS, WITH, WITHOUT, likeliest, with_decoys
from metatokens.looking.page import Look, coarse, to_html
from tests.analysis.recording_oracle import RecordingOracle
from tests.retrofit.architectures import (
    META,
    ROUNDED,
    ROUNDED_WEIGHT,
    error,
    retrofitted,
    with_meta_tokens,
)

Models = Callable[..., Path]

PROMPT = "Birds: swan owl _PAUSE_ duck\nQ: What is item 3 of Birds? _PAUSE_"


def looked(
    folder: Path, text: str = PROMPT, markers: str | Sequence[int] = "_PAUSE_", **settings: Any
) -> Look:
    return metatokens.look(
        load_model(folder), load_tokenizer(str(folder)), text, markers, **settings
    )


def text_of(look: Look) -> str:
    """The prompt without its meta-tokens."""
    pairs = zip(look.tokens, look.is_meta, strict=True)
    return "".join(token for token, is_meta in pairs if not is_meta)


def next_token(folder: Path, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Probabilities of the next token, where the meta-token has none."""
    model = load_model(folder)
    with torch.no_grad():
        logits = model(ids[None], attention_mask=mask).logits[0, -1].double()
    logits[model.config.meta_token_id] = -torch.inf
    return logits.softmax(dim=-1)


@pytest.fixture(scope="module")
def folder(small_model: Models) -> Path:
    return small_model(second_attention="meta")


@pytest.fixture(scope="module")
def look(folder: Path) -> Look:
    return looked(folder)


def test_the_prompt_is_encoded_with_its_meta_tokens(look: Look) -> None:
    assert look.ids.tolist() == encode_prompt(look.tokenizer, PROMPT, "_PAUSE_")
    assert text_of(look) == PROMPT.replace(" _PAUSE_", "")
    assert list(look.answers) == [WITH, WITHOUT, DECOYS, COVERED]


@pytest.mark.parametrize("title", [WITH, WITHOUT, DECOYS, COVERED])
def test_answers_are_the_likeliest_tokens_after_each_prompt(
    title: str, folder: Path, look: Look
) -> None:
    ids = look.ids[~look.is_meta] if title == WITHOUT else look.ids
    if title == DECOYS:
        meta, count = look.tokenizer.meta_token_id, int(look.is_meta.sum())
        ids = with_decoys(ids, look.is_meta, meta, count)
    mask = question_mask(look) if title == COVERED else None
    expected = next_token(folder, ids, mask)

    answers = look.answers[title]

    assert answers.ids.tolist() == expected.argsort(descending=True)[:5].tolist()
    assert error(answers.probabilities, expected[answers.ids]) < ROUNDED_WEIGHT


def question_mask(look: Look) -> Tensor:
    """What is in sight of the text and of a question about covered text: the meta-tokens before it, and itself."""
    position = torch.arange(len(look.ids))
    question_start = len(encode_prompt(look.tokenizer, PROMPT.partition("\nQ:")[0], "_PAUSE_"))
    is_question = position >= question_start
    is_in_sight = ~is_question[:, None] | is_question | look.is_meta
    return (is_in_sight & (position <= position[:, None]))[None, None]


def test_a_covered_text_changes_the_answer(look: Look) -> None:
    assert error(look.answers[COVERED].probabilities, look.answers[WITH].probabilities) > 1e-4


def test_what_cannot_be_covered_has_no_such_answer(folder: Path) -> None:
    eager = load_model(folder)
    eager.set_attn_implementation("eager")
    assert COVERED not in looked(folder, "no question _PAUSE_").answers
    assert (
        COVERED
        not in metatokens.look(eager, load_tokenizer(str(folder)), PROMPT, "_PAUSE_").answers
    )


def test_logits_in_double_precision_stay_as_they_are(folder: Path) -> None:
    model = load_model(folder)
    logits = torch.zeros(model.config.vocab_size, dtype=torch.float64)
    assert model.config.meta_token_id not in likeliest(model, logits).ids
    assert logits.isfinite().all()


def test_decoys_come_before_text_and_change_nothing_else() -> None:
    meta = 9
    ids = torch.tensor([1, meta, 2, 3, 4, meta, meta, 5, 6, 7])

    with_more = with_decoys(ids, ids == meta, meta, 3).tolist()

    assert with_more.count(meta) == 6
    text = [token for token in with_more if token != meta]
    assert text == [1, 2, 3, 4, 5, 6, 7]
    assert with_more[0] == 1
    assert with_more[-1] != meta


def test_decoys_need_room() -> None:
    full = torch.tensor([1, 9, 9, 9])
    assert torch.equal(with_decoys(full, full == 9, 9, 3), full)


def test_decoys_stay_within_the_learned_positions(folder: Path, small_model: Models) -> None:
    prompt = "a b c d e f g h _PAUSE_ i _PAUSE_ j _PAUSE_"
    positions = len(looked(folder, prompt).ids) + 1
    learned = small_model(
        second_attention="meta", position_embedding="learned", max_position_embeddings=positions
    )
    assert set(looked(learned, prompt).answers) == {WITH, WITHOUT, DECOYS}


@pytest.mark.parametrize("zeroed", [False, True])
def test_entropies_are_those_of_the_dense_recomputation(
    zeroed: bool, folder: Path, look: Look
) -> None:
    oracle = RecordingOracle(load_model(folder), zeroed=zeroed)
    oracle.logits(look.ids)
    for (module, layer), scores in oracle.scores.items():
        rows = look.positions(module, layer)
        weights = scores[:, rows][:, :, rows].softmax(dim=-1)
        entropy = -(weights * weights.clamp(min=1e-300).log()).sum(dim=-1)
        assert error(look.entropy(module, layer, zeroed=zeroed), entropy) < ROUNDED
    assert look.modules == {"attention": [0, 1], "second_attention": [0, 1]}


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_lens_is_the_head_after_the_norm_of_each_state(name: str) -> None:
    model, ids = retrofitted(name), with_meta_tokens()[0]
    text = " ".join("*" if token == META else f"w{token}" for token in ids.tolist())

    look = metatokens.look(model, word_tokenizer(), text, "*")

    assert torch.equal(look.ids, ids)
    states = torch.stack(list(look.observation.states)).float()
    with torch.no_grad():
        logits = model.lm_head(model.model.norm(states))
    if name == "gemma2":
        cap = model.config.final_logit_softcapping
        logits = cap * torch.tanh(logits / cap)
    logits = logits.double()
    logits[..., META] = -math.inf
    expected, tokens = logits.softmax(dim=-1).topk(5, dim=-1)
    assert error(look.lens.probabilities, expected) < ROUNDED_WEIGHT
    assert (look.lens.ids == tokens).float().mean() > 0.99


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that reads the word `w7` as 7."""
    words = Tokenizer(
        models.WordLevel({"?": META - 1} | {f"w{i}": i for i in range(META - 1)}, unk_token="?")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, extra_special_tokens={"meta_token": META_TOKEN}
    )


def test_the_model_is_left_as_it_was(folder: Path, look: Look) -> None:
    model = load_model(folder)
    before = model(look.ids[None]).logits
    metatokens.look(model, look.tokenizer, PROMPT, "_PAUSE_")
    patched = [module for module in model.modules() if "forward" in vars(module)]
    assert torch.equal(model(look.ids[None]).logits, before)
    assert patched == []


def test_a_model_without_a_meta_token_gets_the_prompt_without(small_model: Models) -> None:
    look = looked(small_model(second_attention="none", meta_token_id=None))
    assert list(look.answers) == [WITHOUT]
    assert not look.is_meta.any()
    assert "".join(look.tokens) == PROMPT.replace(" _PAUSE_", "")
    with pytest.raises(ValueError, match="no meta-token"):
        look.entropy("attention", 0, zeroed=True)


def test_markers_may_be_offsets_and_other_text_stays_text(folder: Path) -> None:
    look = looked(folder, "a _PAUSE_ b _PAUSE_ c", markers=[11])
    assert look.is_meta.sum() == 1
    assert text_of(look) == "a _PAUSE_ b c"
    assert not looked(folder, markers=()).is_meta.any()


@pytest.mark.parametrize(("size", "step"), [(7, 1), (8, 2), (9, 2), (10, 4), (5, 8)])
def test_a_coarse_map_sums_over_keys_and_averages_over_queries(size: int, step: int) -> None:
    weights = torch.rand(3, size, size, generator=torch.Generator().manual_seed(0))

    shown = coarse(weights, step)

    cells = math.ceil(size / step)
    assert shown.shape == (3, cells, cells)
    for y in range(cells):
        for x in range(cells):
            cell = weights[:, y * step : (y + 1) * step, x * step : (x + 1) * step]
            expected = cell.sum(dim=2).mean(dim=1)
            torch.testing.assert_close(shown[:, y, x], expected, atol=1e-6, rtol=0)


def test_the_page_needs_no_other_file_and_escapes_the_prompt(folder: Path) -> None:
    look = looked(
        folder,
        'a </script><script>alert("x")</script> _PAUSE_ b',
        name='<img src=x onerror="alert(1)">',
    )
    page = to_html([look])
    assert 'alert("x")' not in page
    assert "<img" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r'<(script|link|img|iframe)[^>]*(src|href)="', page)
    assert look.to_html() == page


def test_a_notebook_shows_the_page(look: Look) -> None:
    assert "<iframe srcdoc=" in look._repr_html_()
    assert "<script" not in look._repr_html_()
