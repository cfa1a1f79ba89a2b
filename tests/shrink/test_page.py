"""The page of a run shows the figures of its results."""

import math
import re
from html import unescape

import numpy as np
import pytest

from metatokens.records import Result, pack_hits
from metatokens.shrink.choosing import HeadLoss
from metatokens.shrink.cost import Cost
from metatokens.shrink.page import Findings, write_page

TEXTS, OF_A_TEXT = 2, 6  # of each kind, and look-ups
N = TEXTS * OF_A_TEXT
T_OF_2, T_OF_4, T_OF_12 = (
    12.706,
    3.182,
    2.201,
)  # 97.5 % quantiles of Student's t for means of so many
BASE, SHRUNK, FULL = "full cache, as it was", "shrunk", "full cache, trained alike"
# By model: how many look-ups of each text are answered, by kind; the losses of two excerpts and of two replies.
MEASURED = {
    BASE: ({"statement": (5, 4), "question": (3, 3), "passage": (0, 0)}, (2.0, 2.5), (0.5, 0.5)),
    SHRUNK: ({"statement": (4, 4), "question": (0, 3), "passage": (1, 0)}, (2.2, 2.6), (0.7, 0.9)),
    FULL: ({"statement": (6, 5), "question": (6, 6), "passage": (6, 6)}, (2.1, 2.4), (0.6, 0.6)),
}


def results_of(model):
    """Results of look-ups in 128 and in 256 tokens, of a user's questions, and of prose."""
    counts_by_kind, *losses = MEASURED[model]
    shared = {"model": model, "seed": 5, "n": N}
    shared |= {"kv_kept": 0.25} if model == SHRUNK else {}
    lines = []
    for kind, counts in counts_by_kind.items():
        hits = [number < count for count in counts for number in range(OF_A_TEXT)]
        lookup = {"metric": "exact_match", "value": np.mean(hits), "hits": pack_hits(hits)}
        lines += [shared | lookup | {"task": kind, "length": length} for length in (256, 128)]
        if kind == "statement":
            lines.append(shared | lookup | {"task": "own"})
    perplexity = shared | {"metric": "perplexity"}
    for kind, of_kind in zip(("excerpt", "reply"), losses, strict=True):
        for number, loss in enumerate(of_kind):
            lines.append(perplexity | {"text": f"{kind} {number}", "value": math.exp(loss)})
    return [Result.model_validate(line) for line in lines]


@pytest.fixture
def write(tmp_path):
    """Writes the page of some models, and returns it with the summary."""

    def page_of(*models, results=None, texts_of_prose=2, landmarks=None):
        if results is None:
            results = [result for model in models for result in results_of(model)]
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
            results=[
                result
                for result in results
                if result.text is None or int(result.text[-1]) < texts_of_prose
            ],
            losses=[
                HeadLoss(head=None, loss=1.5, answered=3, n=4),
                HeadLoss(head=(2, 1), loss=7.25, answered=1, n=4),
            ],
            costs=[cost],
            window=9,
            full_heads=[(2, 1)],
            landmarks=landmarks,
            out=tmp_path,
            base="a <b> & c",
            length=200,
            steps=7,
        )
        write_page(findings, tmp_path / "page.html")
        return (tmp_path / "page.html").read_text(encoding="utf-8"), findings.summary

    return page_of


def expected_cell(shares, n, t):
    """The mean in % with the wider one of two intervals: Wilson's of n look-ups, Student's of the shares of texts."""
    mean = np.mean(shares)
    centre = (mean + 1.96**2 / (2 * n)) / (1 + 1.96**2 / n)
    wilson = 1.96 / (1 + 1.96**2 / n) * math.sqrt(mean * (1 - mean) / n + 1.96**2 / (4 * n**2))
    student = t * np.std(shares, ddof=1) / math.sqrt(len(shares))
    low = max(0, min(centre - wilson, mean - student))
    high = min(1, max(centre + wilson, mean + student))
    return f"{100 * mean:.0f} ({100 * low:.0f} to {100 * high:.0f})"


def cells_of(page):
    """The rows of all tables."""
    return [
        [unescape(text) for text in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)]
        for row in re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    ]


def test_the_tables_show_the_results(write):
    page, _ = write(*MEASURED)
    cells = cells_of(page)
    statements, passages, new = [], [], []
    for counts, _, _ in MEASURED.values():
        shares = {kind: np.array(of_kind) / OF_A_TEXT for kind, of_kind in counts.items()}
        statements.append(expected_cell(shares["statement"], N, T_OF_2))
        both = np.concatenate([shares["statement"], shares["question"]])
        new.append(expected_cell(both, 2 * N, T_OF_4))
        single = [number < count for count in counts["passage"] for number in range(OF_A_TEXT)]
        passages.append(expected_cell(single, N, T_OF_12))
    for length in ("128", "256"):
        start = cells.index([f"in {length} tokens", *MEASURED])
        assert cells[start + 1] == ["kept, %", "100.0", "25.0", "100.0"]
        # Without the passages.
        assert cells[start + 2] == ["all look-ups of forms without training (24)", *new]
        kinds = [row[1:] for row in cells[start + 3 : start + 6]]
        assert kinds[0] == passages
        assert statements in kinds
    shrunk = [SHRUNK]
    for differences, mean in (((0.1, 0.2), "2.400"), ((0.1, 0.3), "0.800")):
        error = T_OF_2 * np.std(differences, ddof=1) / math.sqrt(2)
        middle = sum(differences) / 2
        shrunk += [mean, f"{middle:+.3f} ({middle - error:+.3f} to {middle + error:+.3f})"]
    assert shrunk in cells
    assert ["4,096", "full", "12.3", "1234", "5.7", "cpu", "3"] in cells
    assert ["2.1", "7.25", "1 of 4"] in cells
    assert ["none", "1.50", "3 of 4"] in cells


def test_the_sentences_give_the_results(write):
    page, summary = write(*MEASURED)
    text = " ".join(unescape(re.sub("<[^>]*>", "", page)).split())
    assert summary in text
    assert summary.startswith(
        "In texts of 128 tokens the cache keeps 25.0 % of the keys and values. "
    )
    assert "answers 46 % of the look-ups whose form it was not trained on. " in summary
    assert "The full cache, trained alike: 96 %. Prose costs +0.150 nats a token more (" in summary
    assert "Seed 5, 7 steps of training" in text
    assert f"Your own 12 held-out questions: {BASE} 75 (" in text
    assert "A smaller cache for a <b> & c" in text
    assert "the meta-tokens of" not in text
    with_landmarks, _ = write(*MEASURED, landmarks="every:9")
    assert "the meta-tokens of <code>every:9</code>" in with_landmarks
    assert "so nothing was asked in a chat" in text
    assert not re.search(r'(src|href)="?http', page)


def test_a_kind_that_a_length_lacks_has_no_figure(write):
    of_shrunk = [
        line for line in results_of(SHRUNK) if (line.task, line.length) != ("passage", 128)
    ]
    page, _ = write(results=of_shrunk)
    start = cells_of(page).index(["in 128 tokens", SHRUNK])
    assert ["a passage of the text, repeated (0)", "-"] in cells_of(page)[start : start + 6]


def test_a_run_without_the_trained_control_is_not_summed_up_by_the_base(write):
    page, summary = write(SHRUNK, BASE)
    assert summary.endswith("answers 46 % of the look-ups whose form it was not trained on.")
    assert f"more than {BASE}" in page


def test_a_model_alone_is_compared_with_nothing(write):
    page, summary = write(SHRUNK)
    assert summary.endswith("answers 46 % of the look-ups whose form it was not trained on.")
    assert [SHRUNK, "2.400", "0.800"] in cells_of(page)


def test_one_excerpt_says_nothing(write):
    page, summary = write(*MEASURED, texts_of_prose=1)
    assert "nats a token more" not in page + summary
