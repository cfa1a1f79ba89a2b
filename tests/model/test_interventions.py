"""Interventions against the dense oracle, whose tables and weights are edited by hand; the rest stays unchanged."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from metatokens import MetaGPT2ForCausalLM, MetaTokenCache
from metatokens.errors import UserError
from metatokens.model.interventions import Intervention, Neither, NoEmbedding, Noise, NoPosition, intervene
from tests.model.dense_oracle import DenseOracle
from tests.model.tiny_models import META, SECOND, pad, random_rows, shared_model, tiny_config, tiny_model
from tests.numbers import ROUNDED, ROUNDED_DOUBLE

ROWS = random_rows((14, 9, 6, 4))
NAMES = ["no_pos", "no_embed", "neither", "noise:0.5", "noise:0.5:meta", "noise:0.5:raw", "noise:2:meta:raw"]
AT_META = [name for name in NAMES if name not in ("noise:0.5", "noise:0.5:raw")]
HALF = 4  # frequencies of a tiny model's heads
TOLERANCE = 3e-6  # rotary tables and noise are float32

INTERVENTIONS = pytest.mark.parametrize("name", NAMES)
POSITIONS = pytest.mark.parametrize("position_embedding", ["learned", "rope"])


def logits_with(model: MetaGPT2ForCausalLM, name: str, ids: Tensor, seed: int = 0, **inputs: Tensor) -> Tensor:
    with intervene(model, Intervention.parse(name), seed=seed):
        return model(ids, **inputs).logits


# --- names


@pytest.mark.parametrize(
    ("name", "intervention"),
    [
        ("no_pos", NoPosition()),
        ("no_embed", NoEmbedding()),
        ("neither", Neither()),
        ("noise:0", Noise(0.0)),
        ("noise:0.5", Noise(0.5)),
        ("noise:1:meta", Noise(1.0, meta_only=True)),
        ("noise:2:raw", Noise(2.0, raw=True)),
        ("noise:1e-05:meta:raw", Noise(1e-5, meta_only=True, raw=True)),
    ],
)
def test_names(name: str, intervention: Intervention) -> None:
    assert Intervention.parse(name) == intervention
    assert str(intervention) == name


@given(scale=st.floats(0, allow_infinity=False), meta_only=st.booleans(), raw=st.booleans())
def test_every_noise_has_a_name(scale: float, meta_only: bool, raw: bool) -> None:
    intervention = Noise(scale, meta_only, raw)
    assert Intervention.parse(str(intervention)) == intervention


@pytest.mark.parametrize(
    "name",
    ["", "full", "no_pos:", "no_pos:meta", "neither:0.5", "noise", "noise:", "noise:meta", "noise:-1", "noise:inf"]
    + [f"noise:1:{options}" for options in ("", "all", "std", "raw:meta", "meta:meta", "META")],
)
def test_other_names_are_refused(name: str) -> None:
    allowed = r"no_pos, no_embed, neither, noise:S\[:meta\]\[:raw\] with S at least 0\.$"
    with pytest.raises(UserError, match=f"^no intervention '{name}'; allowed are {allowed}"):
        Intervention.parse(name)


def test_a_new_intervention_is_a_new_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intervention, "kinds", dict(Intervention.kinds))

    class Doubled(Intervention, usage="doubled"):
        has_positions = False

        def change_embeddings(self, embeddings: Tensor) -> Tensor:
            return 2 * embeddings

    model, ids = tiny_model(), torch.tensor([ROWS[0]])
    embeddings = model.get_input_embeddings()(ids) * torch.where(ids == META, 2, 1)[..., None]
    expected = model(inputs_embeds=embeddings, meta_token_mask=ids == META).logits
    assert torch.equal(logits_with(model, "doubled", ids), expected)


# --- what they do


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """Logits of text tokens by the dense oracle for one sequence, its tables or angles edited to match a name.

    The meta-token's logit is left out, since the oracle's head is tied to the embedding, which is edited.
    """

    def logits(model: MetaGPT2ForCausalLM, name: str, sequence: list[int], seed: int = 0) -> Tensor:
        oracle = DenseOracle(model)
        length, is_meta = len(sequence), torch.tensor(sequence) == META
        kind, *options = name.split(":")
        there = is_meta if kind != "noise" or "meta" in options else torch.ones(length, dtype=torch.bool)
        scale = float(options[0]) if kind == "noise" else 0.0

        def noise(width: int) -> Tensor:
            drawn = np.random.default_rng(seed).standard_normal((length, width), dtype=np.float32)
            return scale * torch.from_numpy(drawn).double() * there[:, None]

        with torch.no_grad():
            if model.config.position_embedding == "learned":
                table = oracle.weights["model.learned_positions.weight"]
                if kind in ("no_pos", "neither"):
                    table[:length][there] = 0.0
                elif kind == "noise":
                    unit = 1.0 if "raw" in options else table.flatten().numpy().std(ddof=1)
                    table[:length] += unit * noise(table.shape[1])
            else:
                times = torch.arange(length, dtype=torch.float64)[:, None]
                frequencies = 10000.0 ** (-torch.arange(HALF, dtype=torch.float64) / HALF)
                if kind in ("no_pos", "neither"):
                    times[there] = 0.0
                elif "raw" not in options:
                    times = times + noise(1)
                angles = times * frequencies + (noise(HALF) if "raw" in options else 0.0)
                monkeypatch.setattr("tests.model.dense_oracle.rotate_by_position", lambda x: turn(x, angles))
            if kind in ("no_embed", "neither"):
                oracle.weights["model.embed_tokens.weight"][META] = 0.0
            return oracle.logits(sequence)[:, :META]

    return logits


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """x (heads, T, d) as d/2 complex numbers, each turned by its angle (T, d/2)."""
    real, imaginary = x.tensor_split(2, dim=-1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


@INTERVENTIONS
@POSITIONS
@SECOND
def test_each_row_of_a_batch_is_the_edited_oracle(
    name: str, position_embedding: str, second_attention: str, edited: Callable[..., Tensor]
) -> None:
    model = shared_model(position_embedding=position_embedding, second_attention=second_attention)
    for side in ("left", "right"):
        ids, mask = pad(ROWS, side)
        batched = logits_with(model, name, ids, attention_mask=mask)
        changed = model(ids, attention_mask=mask).logits - batched
        for row, logits, difference, real in zip(ROWS, batched, changed, mask.bool(), strict=True):
            expected = edited(model, name, row)
            scale = expected.abs().max()
            assert (logits[real][:, :META] - expected).abs().max() <= TOLERANCE * scale
            is_met = ("noise" in name and "meta" not in name) or META in row[1:]  # position 0 has no angle to lose
            assert not is_met or difference[real].abs().max() > 1e-3 * scale


@POSITIONS
@pytest.mark.parametrize("unit", ["", ":raw"])
def test_the_seed_decides_the_noise(position_embedding: str, unit: str, edited: Callable[..., Tensor]) -> None:
    model, name = shared_model(position_embedding=position_embedding), f"noise:1{unit}"
    ids = torch.tensor([ROWS[0]])
    first, again, other = (logits_with(model, name, ids, seed=seed)[0] for seed in (0, 0, 7))
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 1e-2
    expected = edited(model, name, ROWS[0], seed=7)
    assert (other[:, :META] - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_interventions_on_scaled_rotary_positions_are_positions_edited_by_hand() -> None:
    scaled = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 12}
    ids = torch.tensor([ROWS[0]])
    is_meta, times = ids == META, torch.arange(len(ROWS[0]))[None]
    drawn = torch.from_numpy(np.random.default_rng(0).standard_normal((1, len(ROWS[0])), dtype=np.float32))
    edited = {
        "no_pos": times * ~is_meta,
        "noise:0.7": times + 0.7 * drawn,
        "noise:0.7:meta": times + 0.7 * drawn * is_meta,
    }
    model = tiny_model(rope_parameters=scaled, max_position_embeddings=48)
    for name, position_ids in edited.items():
        expected = model(ids, torch.ones_like(ids), position_ids=position_ids).logits  # with a mask: one sequence
        assert (logits_with(model, name, ids) - expected).abs().max() <= ROUNDED * expected.abs().max()


@SECOND
def test_rows_of_the_head_are_never_zeroed(second_attention: str) -> None:
    model, ids = shared_model(second_attention=second_attention), torch.tensor([ROWS[0]])
    with intervene(model, NoEmbedding()):
        states, logits = model.model(ids).last_hidden_state, model(ids).logits
    assert torch.equal(logits, states @ model.model.embed_tokens.weight.T)
    assert logits[..., META].abs().min() > 0


@POSITIONS
def test_contexts_can_be_nested(position_embedding: str) -> None:
    model, ids = shared_model(position_embedding=position_embedding), torch.tensor([ROWS[0]])
    with intervene(model, NoPosition()):
        assert torch.equal(model(ids).logits, logits_with(model, "no_pos", ids))
        assert torch.equal(logits_with(model, "no_embed", ids), logits_with(model, "neither", ids))


# --- cached keys and generation


@INTERVENTIONS
@POSITIONS
@SECOND
def test_cached_steps_give_the_logits_of_one_pass(name: str, position_embedding: str, second_attention: str) -> None:
    model = shared_model(position_embedding=position_embedding, second_attention=second_attention)
    ids, mask = pad(ROWS)
    cache, pieces = MetaTokenCache(model.config), []
    with intervene(model, Intervention.parse(name)):
        expected = model(ids, attention_mask=mask).logits
        for start, end in pairwise([0, 1, 5, 12, 14]):
            piece = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
            pieces.append(piece.logits)
    assert (torch.cat(pieces, dim=1) - expected)[mask.bool()].abs().max() < ROUNDED_DOUBLE


@INTERVENTIONS
@POSITIONS
def test_generation_is_the_oracles_greedy_choice(
    name: str, position_embedding: str, edited: Callable[..., Tensor]
) -> None:
    model, prompt = shared_model(position_embedding=position_embedding), ROWS[1]
    options = {"max_new_tokens": 6, "meta_every": 2, "do_sample": False, "pad_token_id": 0}
    with intervene(model, Intervention.parse(name)):
        ids = torch.tensor([prompt])
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    sequence = list(prompt)
    for count, token in enumerate(generated, start=1):
        assert token == edited(model, name, sequence)[-1].argmax()
        sequence += [token, META] if count % 2 == 0 else [token]


# --- what stays unchanged


@pytest.mark.parametrize("name", AT_META)
@POSITIONS
def test_a_prompt_without_meta_tokens_is_not_affected(name: str, position_embedding: str) -> None:
    model = shared_model(position_embedding=position_embedding)
    ids = torch.tensor(random_rows((12, 12), meta_rate=0.0))
    assert torch.equal(logits_with(model, name, ids), model(ids).logits)


@POSITIONS
def test_no_noise_and_no_intervention_change_nothing(position_embedding: str) -> None:
    model, ids = shared_model(position_embedding=position_embedding), torch.tensor([ROWS[0]])
    plain = model(ids).logits
    for name in ("noise:0", "noise:0:raw"):
        assert torch.equal(logits_with(model, name, ids), plain)
    with intervene(model, None):
        assert torch.equal(model(ids).logits, plain)


@INTERVENTIONS
@POSITIONS
def test_the_model_is_as_it_was_afterwards(name: str, position_embedding: str) -> None:
    model, ids = tiny_model(position_embedding=position_embedding), torch.tensor([ROWS[0]])
    plain, weights = model(ids).logits, {key: value.clone() for key, value in model.state_dict().items()}
    logits_with(model, name, ids)
    assert torch.equal(model(ids).logits, plain)
    with pytest.raises(IndexError), intervene(model, Intervention.parse(name)):
        model(torch.tensor([[META, 64]]))  # beyond the vocabulary
    assert torch.equal(model(ids).logits, plain)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@INTERVENTIONS
@POSITIONS
def test_the_models_own_type_is_kept(name: str, position_embedding: str, dtype: torch.dtype) -> None:
    model = tiny_model(position_embedding=position_embedding, dtype=dtype)
    logits = logits_with(model, name, torch.tensor([ROWS[0]]))
    assert logits.dtype == dtype
    assert logits.isfinite().all()


# --- models that lack something


def test_the_embedding_of_a_model_without_positions(edited: Callable[..., Tensor]) -> None:
    model, ids = shared_model(position_embedding="none"), torch.tensor([ROWS[0]])
    embedding = model.model.embed_tokens.weight.detach().clone()
    embedding[META] = 0
    expected = model(ids).logits
    actual = logits_with(model, "no_embed", ids)
    assert (actual - expected).abs().max() > 1e-2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model, "embed_tokens", torch.nn.Embedding.from_pretrained(embedding))
        expected = model(ids).logits
    assert torch.equal(actual, expected)


def test_a_gpt2_without_meta_token_can_be_given_noise() -> None:
    model, ids = without_meta_token(), torch.arange(20)[None]
    assert not torch.equal(logits_with(model, "noise:0.5", ids), model(ids).logits)


def without_meta_token() -> MetaGPT2ForCausalLM:
    sizes = GPT2Config(n_embd=32, n_layer=1, n_head=4, n_positions=48, vocab_size=64)
    return MetaGPT2ForCausalLM.from_gpt2(GPT2LMHeadModel(sizes).eval())


@pytest.mark.parametrize("name", AT_META)
def test_what_a_model_lacks_cannot_be_changed(name: str) -> None:
    with (
        pytest.raises(UserError, match=f"^{name} changes meta-tokens, and this model has no meta_token_id"),
        intervene(without_meta_token(), Intervention.parse(name)),
    ):
        pass
    if name != "no_embed":
        with (
            pytest.raises(UserError, match=f"^{name} changes positions.*position_embedding 'none'"),
            intervene(shared_model(position_embedding="none"), Intervention.parse(name)),
        ):
            pass


def test_other_inputs_than_ids_are_refused() -> None:
    model, ids = shared_model(), torch.tensor([ROWS[0]])
    others = {
        "inputs_embeds": {"inputs_embeds": model.get_input_embeddings()(ids)},
        "meta_token_mask": {"input_ids": ids, "meta_token_mask": ids == 7},
    }
    for name, inputs in others.items():
        with (
            pytest.raises(UserError, match=f"by their ids: give input_ids, and no {name}"),
            intervene(model, NoEmbedding()),
        ):
            model(**inputs)


def test_a_length_beyond_the_learned_table_is_still_refused() -> None:
    model = MetaGPT2ForCausalLM(tiny_config(position_embedding="learned", max_position_embeddings=8)).eval()
    with pytest.raises(UserError, match="9 tokens is longer than the 8 learned positions"):
        logits_with(model, "noise:0.5", torch.ones(1, 9, dtype=torch.long))
