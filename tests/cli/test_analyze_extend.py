"""`evaluate --intervention`, `analyze` and `extend`."""

import json
from collections.abc import Callable
from pathlib import Path

from metatokens.data.store import TokenStore
from metatokens.records import Measurement
from tests.cli.command_lines import SMALL, Run, Succeed


def test_interventions_analyses_and_extension(
    workplace: Path, small_model: Callable[..., Path], small_store: TokenStore, metatokens: Run, run: Succeed
) -> None:
    model = small_model(max_position_embeddings=32)
    evaluation = f"evaluate --model {model} --task parity --lengths 64 -n 4 --name meta"
    lines = {
        given: [json.loads(line) for line in metatokens(f"{evaluation} {given}")[1].splitlines()]
        for given in ("", "--intervention noise:0", "--intervention noise:50 --noise-seed 3")
    }
    plain, none, noisy = ([(line.get("intervention"), line["value"]) for line in found] for found in lines.values())
    assert [name for name, _ in (*plain, *none, *noisy)] == [None, None, "noise:0", "noise:0", "noise:50", "noise:50"]
    assert [value for _, value in plain] == [value for _, value in none]

    for kind, metrics in {
        "sharpness": {"attention_entropy_change", "premise_holds"},
        "residual": {"similarity_centred", "attention_weight"},
        "rate-distortion": {"rate", "distortion"},
    }.items():
        n = 70 if kind == "rate-distortion" else 3
        output, _ = run(f"analyze {kind} --model {model} --task parity --length 64 -n {n} --fits 1 --name meta")
        measured = [Measurement.model_validate_json(line) for line in output.splitlines()]
        assert metrics <= {one.metric for one in measured}
        about = {(one.model, one.task, one.length, one.condition) for one in measured}
        assert about == {("meta", "parity", 64, "paper")}

    settings = SMALL.replace("data.tokens=tokens", f"data.tokens={small_store.path}")
    status, _, error = metatokens(f"extend --model {model} --factor 2 --recipe demo {settings} --out longer")
    assert (status, error.splitlines()[-1]) == (0, "model: longer")
    rope = json.loads((workplace / "longer" / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 2.0, 32)
