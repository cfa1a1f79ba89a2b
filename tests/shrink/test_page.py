"""The page of a run shows the figures of its results."""

import math
import re
from html import unescape

import numpy as np
import pytest

from metatokens.records import Result
from metatokens.shrink.choosing import BlockLoss
from metatokens.shrink.cost import Cost
from metatokens.shrink.page import Findings, write_page

# By model: the hits of each kind of look-up, and the losses of two excerpts of prose and of two replies.
MEASURED = {
    "full cache, as it was": (
        {"statement": 8, "question": 5, "passage": 0},
        (2.0, 2.5),
        (0.5, 0.5),
    ),
    "shrunk": ({"statement": 7, "question": 2, "passage": 1}, (2.2, 2.6), (0.7, 0.9)),
    "full cache, trained alike": (
        {"statement": 9, "question": 9, "passage": 9},
        (2.1, 2.4),
        (0.6, 0.6),
    ),
}
QUESTIONS = 10  # of each kind


def results_of(model):
    """Results of look-ups in 128 and in 256 tokens, of a user's questions, and of prose."""
    hits, *losses = MEASURED[model]
    shared = {"model": model, "seed": 0, "n": QUESTIONS}
    shared |= {"kv_kept": 0.25} if model == "shrunk" else {}
    lookup = shared | {"metric": "exact_match"}
    lines = [lookup | {"task": "own", "value": 0.3}]
    for kind, count in hits.items():
        for length in (256, 128):
            lines.append(lookup | {"task": kind, "length": length, "value": count / QUESTIONS})
    perplexity = shared | {"metric": "perplexity"}
    for kind, of_kind in zip(("excerpt", "reply"), losses, strict=True):
        for number, loss in enumerate(of_kind):
            lines.append(perplexity | {"text": f"{kind} {number}", "value": math.exp(loss)})
    return [Result.model_validate(line) for line in lines]


@pytest.fixture
def page(tmp_path):
    """The page of these results."""
    cost = Cost(
        cache="full",
        length=4096,
        cache_bytes=12_345_678,
        read_per_second=1234.4,
        new_per_second=5.67,
        device="cpu",
        threads=3,
    )
    findings = Findings(
        results=[result for model in MEASURED for result in results_of(model)],
        losses=[
            BlockLoss(block=None, loss=1.5, answered=3, n=4),
            BlockLoss(block=2, loss=7.25, answered=1, n=4),
        ],
        costs=[cost],
        cache={"window": 9, "full_layers": [2]},
        out=tmp_path,
        base="a <b> & c",
        length=200,
    )
    write_page(findings, tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_tables_show_the_results(page):
    cells = [
        [unescape(text) for text in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)]
        for row in re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    ]
    for length in ("128", "256"):
        start = cells.index([f"in {length} tokens", *MEASURED])
        assert cells[start + 1] == ["kept, %", "100.0", "25.0", "100.0"]
        # Without the passages. The intervals were computed by hand, by Wilson's formula.
        assert cells[start + 2] == [
            "all look-ups of forms without training (20)",
            "65 (43 to 82)",
            "45 (26 to 66)",
            "90 (70 to 97)",
        ]
        kinds = [row[1:] for row in cells[start + 3 : start + 6]]
        assert kinds[0] == ["0 (0 to 28)", "10 (2 to 40)", "90 (60 to 98)"]
        assert ["80 (49 to 94)", "70 (40 to 89)", "90 (60 to 98)"] in kinds
    shrunk = ["shrunk"]
    for differences, mean in (((0.1, 0.2), "2.400"), ((0.1, 0.3), "0.800")):
        error = 1.96 * np.std(differences, ddof=1) / math.sqrt(2)
        middle = sum(differences) / 2
        shrunk += [mean, f"{middle:+.3f} ({middle - error:+.3f} to {middle + error:+.3f})"]
    assert shrunk in cells
    assert ["4,096", "full", "12.3", "1234", "5.7"] in cells
    assert ["2", "7.25", "1 of 4"] in cells
    assert ["none", "1.50", "3 of 4"] in cells


def test_the_sentences_give_the_results(page):
    text = " ".join(unescape(re.sub("<[^>]*>", "", page)).split())
    assert "In texts of 128 tokens the cache keeps 25.0 % of the keys and values." in text
    assert "answers 45 % of the look-ups whose form it was not trained on;" in text
    assert "full cache, trained alike: 90 %." in text
    assert "Your own 10 held-out questions: full cache, as it was 30 (11 to 60);" in text
    assert "A smaller cache for a <b> & c" in text
    assert not re.search(r'(src|href)="?http', page)
