"""Interventions against the dense oracle, whose tables and weights are edited by hand; the rest stays unchanged."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from metatokens import MetaGPT2ForCausalLM
from metatokens.errors import UserError
from metatokens.model.interventions import Intervention, intervene
from tests.model.agreement import assert_close
from tests.model.dense_oracle import DenseOracle
from tests.model.generating import greedy_text
from tests.model.tiny_models import META, SECOND, pad, random_rows, shared_model, tiny_model

ROWS = random_rows((14, 9, 6, 4))
IDS = torch.tensor([ROWS[0]])
AT_META = ["no_pos", "no_embed", "neither", "noise:0.5:meta", "noise:2:meta:raw"]
NAMES = [*AT_META, "noise:0.5", "noise:0.5:raw"]
HALF = 4  # frequencies of a tiny model's heads
TOLERANCE = 3e-6  # rotary tables and noise are float32

INTERVENTIONS = pytest.mark.parametrize("name", NAMES)
POSITIONS = pytest.mark.parametrize("position_embedding", ["learned", "rope"])
Edited = Callable[..., Tensor]


def logits_with(
    model: MetaGPT2ForCausalLM, name: str, ids: Tensor = IDS, **inputs: Tensor
) -> Tensor:
    with intervene(model, Intervention.parse(name)):
        return model(ids, **inputs).logits


# --- names


@pytest.mark.parametrize(
    ("name", "intervention"),
    [
        ("no_pos", Intervention("no_pos")),
        ("noise:0.25", Intervention("noise", 0.25, meta_only=False)),
        ("noise:1:meta", Intervention("noise", 1.0)),
        ("noise:1e-05:meta:raw", Intervention("noise", 1e-5, raw=True)),
        ("noise:1e+16", Intervention("noise", 1e16, meta_only=False)),
    ],
)
def test_names(name: str, intervention: Intervention) -> None:
    assert Intervention.parse(name) == intervention
    assert str(intervention) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "full",
        "no_pos:meta",
        "noise",
        "noise:-1",
        "noise:inf",
        "noise:1e999",
        "noise:1:raw:meta",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    allowed = r"no_pos, no_embed, neither, noise:S\[:meta\]\[:raw\] with S at least 0\.$"
    with pytest.raises(UserError, match=f"^no intervention '{name}'; allowed are {allowed}"):
        Intervention.parse(name)


def test_another_kind_is_refused() -> None:
    with pytest.raises(UserError, match="no intervention 'no_position'; allowed are no_pos"):
        Intervention("no_position")


# --- what they do


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> Edited:
    """Logits of text tokens by the dense oracle for one sequence, its tables or angles edited to match a name.

    The meta-token's logit is left out, since the oracle's head is tied to the embedding, which is edited.
    """

    @torch.no_grad()
    def logits(model: MetaGPT2ForCausalLM, name: str, sequence: list[int]) -> Tensor:
        oracle = DenseOracle(model)
        length, is_meta = len(sequence), torch.tensor(sequence) == META
        kind, *options = name.split(":")
        is_changed = (
            is_meta
            if kind != "noise" or "meta" in options
            else torch.ones(length, dtype=torch.bool)
        )
        scale = float(options[0]) if kind == "noise" else 0.0

        def noise(width: int) -> Tensor:
            drawn = np.random.default_rng(0).standard_normal((length, width), dtype=np.float32)
            return scale * torch.from_numpy(drawn).double() * is_changed[:, None]

        if model.config.position_embedding == "learned":
            table = oracle.weights["model.learned_positions.weight"]
            if kind in ("no_pos", "neither"):
                table[:length][is_changed] = 0.0
            elif kind == "noise":
                unit = 1.0 if "raw" in options else table.flatten().numpy().std(ddof=1)
                table[:length] += unit * noise(table.shape[1])
        else:
            times = torch.arange(length, dtype=torch.float64)[:, None]
            if kind in ("no_pos", "neither"):
                times[is_changed] = 0.0
            elif "raw" not in options:
                times = times + noise(1)
            angles = times * 10000.0 ** (-torch.arange(HALF, dtype=torch.float64) / HALF)
            if "raw" in options:
                angles = angles + noise(HALF)
            monkeypatch.setattr(
                "tests.model.dense_oracle.rotate_by_position", lambda x: turn(x, angles)
            )
        if kind in ("no_embed", "neither"):
            oracle.weights["model.embed_tokens.weight"][META] = 0.0
        return oracle.logits(sequence)[:, :META]

    return logits


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """x (heads, T, d) as d/2 complex numbers, each turned by its angle (T, d/2)."""
    real, imaginary = x.tensor_split(2, dim=-1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("side", ["left", "right"])
@INTERVENTIONS
@POSITIONS
@SECOND
def test_each_row_of_a_batch_is_the_edited_oracle(
    name: str, position_embedding: str, second_attention: str, side: str, edited: Edited
) -> None:
    model = shared_model(position_embedding=position_embedding, second_attention=second_attention)
    ids, mask = pad(ROWS, side)
    changed, plain = (
        logits_with(model, name, ids, attention_mask=mask),
        model(ids, attention_mask=mask).logits,
    )
    for number, row in enumerate(ROWS):
        real = mask[number].bool()
        expected = edited(model, name, row)
        assert_close(changed[number, real][:, :META], expected, TOLERANCE)
        is_noise_at_text = "noise" in name and "meta" not in name
        if is_noise_at_text or META in row[1:]:  # position 0 has no angle to lose
            assert (changed - plain)[number, real].abs().max() > 1e-3 * expected.abs().max()


@POSITIONS
def test_contexts_can_be_nested(position_embedding: str) -> None:
    model = shared_model(position_embedding=position_embedding)
    with intervene(model, Intervention("no_pos")):
        assert torch.equal(model(IDS).logits, logits_with(model, "no_pos"))
        assert torch.equal(logits_with(model, "no_embed"), logits_with(model, "neither"))


# --- cached keys and generation


@INTERVENTIONS
@POSITIONS
def test_generation_is_the_oracles_greedy_choice(
    name: str, position_embedding: str, edited: Edited
) -> None:
    model, ids = shared_model(position_embedding=position_embedding), torch.tensor([ROWS[1]])
    options = {"max_new_tokens": 6, "meta_every": 2, "do_sample": False, "pad_token_id": 0}
    with intervene(model, Intervention.parse(name)):
        sequence = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0]
    expected = greedy_text(lambda read: edited(model, name, read)[-1], ROWS[1], 6, 2)

    assert sequence[len(ROWS[1]) :].tolist() == expected


# --- what stays unchanged


@pytest.mark.parametrize("name", AT_META)
@POSITIONS
def test_a_prompt_without_meta_tokens_is_not_affected(name: str, position_embedding: str) -> None:
    model = shared_model(position_embedding=position_embedding)
    ids = torch.tensor(random_rows((12, 12), meta_rate=0.0))
    assert torch.equal(logits_with(model, name, ids), model(ids).logits)


@POSITIONS
def test_no_noise_and_no_intervention_change_nothing(position_embedding: str) -> None:
    model = shared_model(position_embedding=position_embedding)
    plain = model(IDS).logits

    for name in ("noise:0", "noise:0:raw"):
        assert torch.equal(logits_with(model, name), plain)
    with intervene(model, None):
        assert torch.equal(model(IDS).logits, plain)


@INTERVENTIONS
@POSITIONS
def test_the_model_is_as_it_was_afterwards(name: str, position_embedding: str) -> None:
    model = tiny_model(position_embedding=position_embedding)
    plain, weights = (
        model(IDS).logits,
        {key: value.clone() for key, value in model.state_dict().items()},
    )
    logits_with(model, name)

    with pytest.raises(IndexError), intervene(model, Intervention.parse(name)):
        model(torch.tensor([[META, 64]]))  # beyond the vocabulary
    assert torch.equal(model(IDS).logits, plain)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key]), key


@INTERVENTIONS
@POSITIONS
def test_the_models_type_stays(name: str, position_embedding: str) -> None:
    logits = logits_with(
        tiny_model(position_embedding=position_embedding, dtype=torch.bfloat16), name
    )
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


# --- models that lack something


@pytest.mark.parametrize("name", AT_META)
def test_what_a_model_lacks_cannot_be_changed(name: str) -> None:
    with pytest.raises(
        UserError, match=f"^{name} changes meta-tokens, and this model has no meta_token_id"
    ):
        logits_with(shared_model(meta_token_id=None, second_attention="none"), name)
    if name != "no_embed":
        with pytest.raises(
            UserError, match=f"^{name} changes positions.*position_embedding 'none'"
        ):
            logits_with(shared_model(position_embedding="none"), name)


def test_other_inputs_than_ids_are_refused() -> None:
    model = shared_model()
    with intervene(model, Intervention("no_embed")):
        with pytest.raises(UserError, match="by their ids: give input_ids, and no inputs_embeds"):
            model(inputs_embeds=torch.zeros(1, 3, 32))
        with pytest.raises(UserError, match="by their ids: give input_ids, and no meta_token_mask"):
            model(IDS, meta_token_mask=IDS == 7)


def test_a_length_beyond_the_learned_table_is_still_refused() -> None:
    model = tiny_model(position_embedding="learned", max_position_embeddings=8)
    with pytest.raises(UserError, match="9 tokens is longer than the 8 learned positions"):
        logits_with(model, "noise:0.5", torch.ones(1, 9, dtype=torch.long))
