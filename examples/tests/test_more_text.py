"""The judge of results/more_text: which lines it compares, and with which partners."""

import json
from pathlib import Path

from results.more_text.judge import RECALL, Lines, main_claims


def write_lines(file: Path, preset: str, meta: float) -> Path:
    """Write lines of eight seeds: `gpt2` and `twin` answer half, `meta` that share, and none in another condition."""
    records = []
    for seed in range(22, 30):
        for model, value in (("gpt2", 0.5), ("twin", 0.5), ("meta", meta + seed / 500)):
            for train_length in (128, 512):
                subject = {
                    "model": model,
                    "seed": seed,
                    "task": "list_recall",
                    "condition": "landmark",
                    "train_condition": "landmark",
                    "train_length": train_length,
                    "length": 256,
                    "metric": "exact_match",
                    "n": 100,
                }
                right = value if train_length == 128 else 0.0
                records.append({**subject, "recipe": f"{preset}/landmark", "value": right})
                records.append({**subject, "recipe": preset, "value": 0.0})
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_it_compares_models_of_a_seed_that_trained_among_landmarks_up_to_128(tmp_path):
    long = Lines(write_lines(tmp_path / "long.jsonl", "more_text", meta=0.7), "more_text")
    brief = Lines(write_lines(tmp_path / "brief.jsonl", "small", meta=0.5), "small")

    leads = long.lead("gpt2", RECALL, 256)
    rows = main_claims(long, brief)

    assert [round(lead, 3) for lead in leads] == [
        round(0.2 + seed / 500, 3) for seed in range(22, 30)
    ]
    of_gpt2 = rows[2]
    assert of_gpt2.startswith("| gpt2 | +25.1 (+24.7 to +25.5) [8] | lead | yes | +5.1 ")
