"""Insertion and the prompts of the tasks hold what is documented, with any arguments and any text."""

import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metatokens import insert_meta_tokens
from metatokens.data.store import TokenStore
from metatokens.data.tokenizer import encode_text
from metatokens.errors import UserError
from metatokens.records import MARKER
from metatokens.tasks.curriculum import CONDITIONS, TASKS, TaskData
from metatokens.tasks.encoding import SegmentEncoder
from metatokens.tasks.example import encode_example, read_examples
from tests.hostile.drawing import TEXT, cases
from tests.hostile.good import Clean

META = 5_000
FRACTIONS = st.floats() | st.floats(0, 0.5) | st.sampled_from([0, 0.1, 0.5, 1, -1, 1e-300, 0.29])
PLACEMENTS = st.sampled_from(["uniform", "periodic", "none"]) | TEXT


@cases(625)
@given(
    size=st.integers(1, 60),
    fraction=FRACTIONS,
    placement=PLACEMENTS,
    ids=st.none() | st.lists(st.integers(-(2**40), 2**40), max_size=60),
    seed=st.integers(0, 2**63),
)
def test_insertion(size: int, fraction: float, placement: str, ids: list[int] | None, seed: int, clean: Clean) -> None:
    is_valid = 0 <= fraction <= 0.5 and placement in ("uniform", "periodic", "none")
    count = int(Decimal(repr(fraction)) * size) if is_valid and placement != "none" else 0
    text = ids if ids is not None else list(range(max(0, size - count)))

    def insert() -> tuple[np.ndarray, np.ndarray]:
        settings = {"meta_token_id": META, "block_size": size, "fraction": fraction, "placement": placement}
        return insert_meta_tokens(text, **settings, generator=np.random.default_rng(seed))

    if not is_valid:
        with clean(), pytest.raises(UserError, match=r"fraction of meta-tokens|unknown placement"):
            insert()
        return
    if len(text) != size - count or META in text:
        with pytest.raises(ValueError, match=r"take -?\d+ text ids|already holds the meta-token's id"):
            insert()
        return
    block, labels = insert()
    is_meta = block == META
    assert (len(block), is_meta.sum()) == (size, size - len(text))
    assert block[~is_meta].tolist() == text
    assert (labels[is_meta] == -100).all()
    assert labels[~is_meta].tolist() == ([-100, *text[1:]] if text else [])


@cases(50)
@given(
    task=st.sampled_from(TASKS) | TEXT,
    condition=st.sampled_from(CONDITIONS) | TEXT,
    seed=st.integers(-2, 2**70),
    phase=st.integers(-1, 7),
    split=st.sampled_from(["train", "test"]) | TEXT,
    documents=st.lists(TEXT, max_size=4),
    index=st.integers(0, 2**70),
)
def test_any_arguments(
    phase: int, split: str, index: int, small_store: TokenStore, clean: Clean, **arguments: Any
) -> None:
    with clean():
        TaskData(tokenizer=small_store.tokenizer, **arguments).sample(index, min(phase, 3), split)


WORDS = st.lists(TEXT.filter(lambda text: text.isprintable()) | st.sampled_from(["word", "it's", "世界"]), min_size=60)


@cases(20)
@given(words=WORDS, index=st.integers(0, 5), condition=st.sampled_from(CONDITIONS[:5]))  # the others are of list recall
def test_copying_from_any_document(
    words: list[str], index: int, condition: str, small_store: TokenStore, clean: Clean
) -> None:
    tokenizer, meta = small_store.tokenizer, small_store.manifest.meta_token_id
    with clean():
        documents = [" ".join(words * times) for times in (3, 2, 1)]
        data = TaskData("copying", tokenizer=tokenizer, condition=condition, documents=documents)
        example = data.sample(index, 1, "train")
        prompt = example.input_ids[: example.answer_start]
        assert list(prompt).count(meta) == len(example.markers)
        assert meta not in example.input_ids[example.answer_start :]
        ids = [token for token in prompt if token != meta]
        texts = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert texts == without_markers(example.prompt, example.markers)


def without_markers(prompt: str, markers: tuple[int, ...]) -> str:
    for offset in reversed(markers):
        assert prompt[offset:].startswith(MARKER)
        prompt = prompt[:offset] + prompt[offset + len(MARKER) :]
    return prompt


SEGMENTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from([MARKER, "<|endoftext|>"])
)


@cases(100)
@given(
    segments=SEGMENTS.filter(bool), completion=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
)
def test_any_text_comes_back_from_a_record(
    segments: list[str], completion: str, small_store: TokenStore, tmp_path_factory: pytest.TempPathFactory
) -> None:
    encoder = SegmentEncoder(small_store.tokenizer)
    example = encode_example(encoder, segments, completion)
    assert list(example.input_ids).count(small_store.manifest.meta_token_id) == len(segments) - 1
    whole = [list(ids) for ids in encode_text(small_store.tokenizer, segments)]
    assert encoder.encode_prompt(segments) == [
        token for place, ids in enumerate(whole) for token in ([encoder.meta_token_id] if place else []) + ids
    ]
    path = tmp_path_factory.getbasetemp() / "example.jsonl"
    path.write_text(json.dumps(example.to_record()) + "\n", encoding="utf-8")
    if example.prompt:
        assert read_examples(path, small_store.tokenizer) == [example]
