"""What `look` finds in a model, recomputed in another way."""

import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from metatokens.looking.figure import draw
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import metatokens
from metatokens import encode_prompt
from metatokens.analysis.observation import observe
from metatokens.checkpoint import load_model
from metatokens.data.tokenizer import META_TOKEN, load_tokenizer
from metatokens.errors import UserError
from metatokens.looking.look import COVERED, DECOYS, WITH, WITHOUT, cover, likeliest, with_decoys
from metatokens.looking.page import Look, coarse, to_html
from tests.analysis.recording_oracle import RecordingOracle
from tests.retrofit.architectures import META, ROUNDED, ROUNDED_WEIGHT, error, retrofitted, with_meta_tokens

Models = Callable[..., Path]

PROMPT = "Birds: swan owl _PAUSE_ duck\nQ: What is item 3 of Birds? _PAUSE_"


def looked(folder: Path, text: str = PROMPT, markers: str | Sequence[int] = "_PAUSE_", **settings: object) -> Look:
    return metatokens.look(load_model(folder), load_tokenizer(str(folder)), text, markers, **settings)


def next_token(folder: Path, ids: list[int]) -> torch.Tensor:
    """Probabilities of the next token, where the meta-token has none."""
    model = load_model(folder).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].double()
    keep = [i for i in range(len(logits)) if i != model.config.meta_token_id]
    return torch.zeros_like(logits).index_put((torch.tensor(keep),), logits[keep].softmax(dim=-1))


def test_answers_are_the_likeliest_tokens_after_each_prompt(small_model: Models) -> None:
    folder = small_model(second_attention="meta")
    look, tokenizer = looked(folder), load_tokenizer(str(folder))
    with_ids = encode_prompt(tokenizer, PROMPT, "_PAUSE_")
    without = [token for part in PROMPT.split(" _PAUSE_") for token in encode_prompt(tokenizer, part)]
    assert look.ids.tolist() == with_ids
    assert "".join(token for token, is_meta in zip(look.tokens, look.is_meta, strict=True) if not is_meta) == (
        PROMPT.replace(" _PAUSE_", "")
    )
    for title, ids in {WITH: with_ids, WITHOUT: without}.items():
        expected = next_token(folder, ids)
        answers = look.answers[title]
        assert answers.ids.tolist() == expected.argsort(descending=True)[:5].tolist()
        assert error(answers.probabilities, expected[answers.ids]) < ROUNDED_WEIGHT
    assert list(look.answers) == [WITH, WITHOUT, DECOYS, COVERED]


def test_a_question_about_covered_text_sees_the_meta_tokens_before_it_and_itself(small_model: Models) -> None:
    folder = small_model(second_attention="meta")
    look, model, tokenizer = looked(folder), load_model(folder).eval(), load_tokenizer(str(folder))
    size, length = len(encode_prompt(tokenizer, PROMPT.partition("\nQ:")[0], "_PAUSE_")), len(look.ids)
    sees = [
        [key <= query and (query < size or key >= size or bool(look.is_meta[key])) for key in range(length)]
        for query in range(length)
    ]
    with torch.no_grad():
        logits = model(look.ids[None], attention_mask=torch.tensor([[sees]])).logits[0, -1].double()
    logits[model.config.meta_token_id] = -torch.inf
    expected, tokens = logits.softmax(dim=-1).topk(5)
    assert look.answers[COVERED].ids.tolist() == tokens.tolist()
    assert error(look.answers[COVERED].probabilities, expected) < ROUNDED_WEIGHT
    assert error(look.answers[WITH].probabilities, expected) > 1e-4
    under = observe(model, look.ids, mask=cover(model, tokenizer, look.ids))
    assert error(likeliest(model, under.logits[-1]).probabilities, expected) < ROUNDED_WEIGHT
    assert torch.equal(under.attention["attention", 1].weights()[0] > 0, torch.tensor(sees))


def test_what_cannot_be_covered_has_no_such_answer(small_model: Models) -> None:
    folder = small_model(second_attention="meta")
    assert COVERED not in looked(folder, "no question _PAUSE_").answers
    model = load_model(folder)
    model.set_attn_implementation("eager")
    assert COVERED not in metatokens.look(model, load_tokenizer(str(folder)), PROMPT, "_PAUSE_").answers


def test_logits_in_double_precision_stay_as_they_are(small_model: Models) -> None:
    model = load_model(small_model(second_attention="meta"))
    logits = torch.zeros(model.config.vocab_size, dtype=torch.float64)
    assert model.config.meta_token_id not in likeliest(model, logits).ids
    assert logits.isfinite().all()


def test_decoys_come_before_text_and_change_nothing_else() -> None:
    meta = 9
    ids = torch.tensor([1, meta, 2, 3, 4, meta, meta, 5, 6, 7])
    for seed in range(20):
        with_more = with_decoys(ids, ids == meta, meta, 3, seed).tolist()
        assert with_more.count(meta) == 6
        assert [token for token in with_more if token != meta] == [1, 2, 3, 4, 5, 6, 7]
        assert with_more[0] == 1
        assert with_more[-1] != meta
    assert len({tuple(with_decoys(ids, ids == meta, meta, 3, seed).tolist()) for seed in range(20)}) > 1
    few = torch.tensor([1, meta, meta, meta])  # without a place
    assert torch.equal(with_decoys(few, few == meta, meta, 3, 0), few)


def test_decoys_stay_within_the_learned_positions(small_model: Models) -> None:
    prompt = "a b c d e f g h _PAUSE_ i _PAUSE_ j _PAUSE_"
    length = len(looked(small_model(second_attention="meta"), prompt).ids)
    folder = small_model(second_attention="meta", position_embedding="learned", max_position_embeddings=length + 1)
    assert set(looked(folder, prompt).answers) == {WITH, WITHOUT, DECOYS}


def test_entropies_are_those_of_the_dense_recomputation(small_model: Models) -> None:
    folder = small_model(second_attention="meta")
    look, model = looked(folder), load_model(folder)
    assert look.modules == {"attention": [0, 1], "second_attention": [0, 1]}
    for zeroed in (False, True):
        oracle = RecordingOracle(model, zeroed=zeroed)
        oracle.logits(look.ids)
        for (module, layer), scores in oracle.scores.items():
            rows = look.positions(module, layer)
            weights = scores[:, rows][:, :, rows].softmax(dim=-1)
            entropy = -(weights * weights.clamp(min=1e-300).log()).sum(dim=-1)
            assert error(look.entropy(module, layer, zeroed=zeroed), entropy) < ROUNDED


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "opt"])
def test_the_lens_is_the_head_after_the_norm_of_each_state(name: str) -> None:
    model, ids = retrofitted(name), with_meta_tokens()[0]
    words = Tokenizer(models.WordLevel({"?": 318} | {f"w{i}": i for i in range(318)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, extra_special_tokens={"meta_token": META_TOKEN})
    assert tokenizer.meta_token_id == META
    text = " ".join("*" if token == META else f"w{token}" for token in ids.tolist())
    look = metatokens.look(model, tokenizer, text, "*")
    assert torch.equal(look.ids, ids)
    states = look.observation.states
    assert look.lens.ids.shape == (len(states), len(look.ids), 5)
    for layer, state in enumerate(states):
        with torch.no_grad():
            logits = after_the_blocks(name, model, state.float()).double()
        logits[:, META] = -math.inf
        probabilities = logits.softmax(dim=-1)
        expected, of = probabilities.topk(5, dim=-1)
        assert error(look.lens.probabilities[layer], expected) < ROUNDED_WEIGHT
        assert (look.lens.ids[layer] == of).float().mean() > 0.99


def after_the_blocks(name: str, model: torch.nn.Module, state: torch.Tensor) -> torch.Tensor:
    """What each architecture computes after its blocks."""
    if name == "gpt2":
        return model.lm_head(model.transformer.ln_f(state))
    if name == "opt":
        return model.lm_head(model.model.decoder.final_layer_norm(state))
    logits = model.lm_head(model.model.norm(state))
    cap = model.config.final_logit_softcapping if name == "gemma2" else None
    return logits if cap is None else cap * torch.tanh(logits / cap)


def test_the_model_is_left_as_it_was(small_model: Models) -> None:
    folder = small_model(second_attention="meta")
    model, tokenizer = load_model(folder).eval(), load_tokenizer(str(folder))
    ids = torch.tensor([encode_prompt(tokenizer, PROMPT, "_PAUSE_")])
    before = model(ids).logits
    metatokens.look(model, tokenizer, PROMPT, "_PAUSE_")
    assert torch.equal(model(ids).logits, before)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_model_without_a_meta_token_gets_the_prompt_without(small_model: Models) -> None:
    folder = small_model(second_attention="none", meta_token_id=None)
    look = looked(folder)
    assert list(look.answers) == [WITHOUT]
    assert not look.is_meta.any()
    assert "".join(look.tokens) == PROMPT.replace(" _PAUSE_", "")
    with pytest.raises(ValueError, match="no meta-token"):
        look.entropy("attention", 0, zeroed=True)
    assert draw([look]).startswith(b"\x89PNG")


def test_markers_may_be_offsets_and_other_text_stays_text(small_model: Models) -> None:
    folder = small_model(second_attention="meta")
    assert not looked(folder, markers=()).is_meta.any()
    text = "a _PAUSE_ b _PAUSE_ c"
    look = looked(folder, text, markers=[11])
    assert look.is_meta.sum() == 1
    assert "".join(token for token, is_meta in zip(look.tokens, look.is_meta, strict=True) if not is_meta) == (
        "a _PAUSE_ b c"
    )


@pytest.mark.parametrize(("size", "step"), [(7, 1), (8, 2), (9, 2), (10, 4), (5, 8)])
def test_a_coarse_map_sums_over_keys_and_averages_over_queries(size: int, step: int) -> None:
    torch.manual_seed(0)
    weights = torch.rand(3, size, size).tril()
    weights = weights / weights.sum(dim=-1, keepdim=True)
    cells = math.ceil(size / step)
    shown = coarse(weights, step)
    assert shown.shape == (3, cells, cells)
    for head in range(3):
        for y in range(cells):
            for x in range(cells):
                queries = range(y * step, min((y + 1) * step, size))
                keys = range(x * step, min((x + 1) * step, size))
                expected = sum(float(weights[head, q, k]) for q in queries for k in keys) / len(queries)
                assert math.isclose(float(shown[head, y, x]), expected, abs_tol=1e-6)


def test_the_page_needs_no_other_file_and_escapes_the_prompt(small_model: Models) -> None:
    folder = small_model(second_attention="meta")
    look = looked(folder, 'a </script><script>alert("x")</script> _PAUSE_ b', name='<img src=x onerror="alert(1)">')
    page = to_html([look])
    assert 'alert("x")' not in page
    assert "<img" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r'<(script|link|img|iframe)[^>]*(src|href)="', page)
    assert look.to_html() == page
    assert "<iframe srcdoc=" in look._repr_html_()
    assert "<script" not in look._repr_html_()


def test_layers_are_chosen_for_page_and_picture(small_model: Models) -> None:
    folder = small_model(second_attention="meta", num_hidden_layers=3)
    whole, some = looked(folder), looked(folder, layers=[0, 2])
    assert whole.modules["attention"] == [0, 1, 2]
    assert some.modules == {name: [0, 2] for name in whole.modules}
    assert torch.equal(some.attention("attention", 2), whole.attention("attention", 2))
    with pytest.raises(UserError, match="there is no block 3; the model has the blocks 0 to 2"):
        looked(folder, layers=[3])


def test_the_ninth_layer_is_in_a_second_row_of_the_picture(small_model: Models) -> None:
    sizes = [
        Image.open(io.BytesIO(draw([looked(small_model(second_attention="meta", num_hidden_layers=layers))]))).size
        for layers in (8, 9)
    ]
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] > 1.9 * sizes[0][1]
