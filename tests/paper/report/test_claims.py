"""The claims as data: every field is one that something reads, and a slip of the pen is an error."""

import re
from collections.abc import Callable
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from metatokens.paper.report import claims as module
from metatokens.paper.report.claims import Claim, claims
from metatokens.paper.report.frame import Inputs
from metatokens.paper.report.verdict import judge
from metatokens.paper.report.words import sections
from tests.paper.report.made_lines import accuracy

Read = Callable[..., Inputs]
SOURCE = files("metatokens.paper.report").joinpath("claims.yaml").read_text(encoding="utf-8")
ALL = list(chain.from_iterable(claims(4).values()))


def test_every_claim_of_the_file_is_read() -> None:
    blocks = yaml.safe_load(SOURCE)
    texts = [text for name, found in blocks.items() if name != "lists" for one in found for text in one["claims"]]
    assert [one.text for one in ALL] == texts
    assert len(texts) == len(set(texts)) > 40
    assert all(one.versus for one in ALL)
    assert sorted(one.headline for one in ALL if one.headline) == [1, 2, 3]


def test_every_claim_stands_in_a_section_and_has_a_source() -> None:
    assert {one.section for one in ALL} <= sections().keys()
    ours, papers = "control|beyond the paper", r"(Figure|Tables?|section|Theorem) \d.*"
    assert [one.source for one in ALL if not re.fullmatch(f"{ours}|{papers}", one.source)] == []
    assert {one.is_the_papers for one in ALL if re.fullmatch(ours, one.source)} == {False}


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.text)
def test_every_comparison_of_a_claim_is_of_fields_that_there_are(one: Claim, read: Read) -> None:
    judged = judge(read([accuracy(0.5, model="nobody")]), one)
    assert judged.comparisons
    assert (judged.run, judged.verdict) == ([], "cannot be told at this scale")
    labels = [comparison.label for comparison in judged.comparisons if comparison.label != "not measured"]
    assert len(set(labels)) == len(labels)
    assert not one.quote or one.quote in labels


def test_what_stands_in_a_block_is_so_of_each_of_its_claims() -> None:
    by_text = {one.text: one for one in ALL}
    mask = by_text["The mask, not the parameters: meta beats twin"]
    assert (mask.section, mask.source, mask.headline) == ("controls", "control", 3)
    [versus] = mask.versus
    assert (versus.a, versus.b) == ({"model": "meta"}, {"model": "twin"})
    assert (mask.margin, mask.negligible) == (0.0, 0.05)
    match = by_text["k = 0.05 and 0.2 do as well as 0.1 (5 points)"]
    assert [one.is_match for one in match.versus] == [True, True]
    assert (match.margin, match.negligible) == (-0.05, -0.05)


def test_lengths_are_the_papers_at_a_presets_scale() -> None:
    for scale in (1, 4):
        found = {one.text: one.versus for one in chain.from_iterable(claims(scale).values())}
        assert {one.scale for one in found["YaRN: exact match above the floor at twice the window"]} == {scale}
        assert {one.scale for one in found["meta beats gpt2 up to 512 tokens"]} == {1}


@pytest.mark.parametrize(
    ("old", "new", "error", "said"),
    [
        ("headline: 2", "headlin: 2", ValueError, "headlin"),
        ("says: match", "say: match", ValueError, "say"),
        ("says: match", "says: no_loss", ValueError, "says"),
        ("unit: plain", "unit: metres", ValueError, "unit"),
        ("{a: meta, b: pause}", "{a: meta, b: pause, with: twin}", ValueError, "with"),
        ("over: *up_to_512, quote", "ovr: *up_to_512, quote", ValueError, "over"),
        ("intervention: no_pos", "intervetion: no_pos", KeyError, "intervetion"),
        ("intervention: no_pos", "interventions: no_pos", KeyError, "interventions"),
        ("length: *upwards", "lenght: *upwards", KeyError, "lenght"),
        ("measured: [batch]", "measured: [batches]", KeyError, "batches"),
        ("{model: meta, metric: tokens_to_learn}", "{modle: meta, metric: tokens_to_learn}", KeyError, "modle"),
        ('label: "{place}, {intervention}"', 'label: "{places}"', KeyError, "places"),
    ],
)
def test_a_misspelt_field_is_an_error(
    old: str, new: str, error: Any, said: str, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert old in SOURCE
    (tmp_path / "claims.yaml").write_text(SOURCE.replace(old, new), encoding="utf-8")
    monkeypatch.setattr(module, "files", lambda package: tmp_path)
    inputs = read([accuracy(0.5)])
    with pytest.raises(error, match=said):
        [judge(inputs, one) for one in chain.from_iterable(claims.__wrapped__(4).values())]
