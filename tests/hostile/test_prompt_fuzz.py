"""Any text stays text in prompts: only the markers of an example become meta-tokens."""

import json

from hypothesis import given
from hypothesis import strategies as st

from metatokens.data.tokenizer import encode_text
from metatokens.records import MARKER
from metatokens.tasks.encoding import SegmentEncoder
from metatokens.tasks.example import encode_example, read_examples
from tests.hostile.drawing import cases

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SEGMENTS = st.lists(ANY_TEXT | st.sampled_from([MARKER, "<|endoftext|>"]), min_size=1)


@cases(100)
@given(segments=SEGMENTS, completion=ANY_TEXT.filter(bool))
def test_any_text_comes_back_from_a_record(segments, completion, small_store, tmp_path_factory):
    encoder = SegmentEncoder(small_store.tokenizer)
    expected_ids = []
    for ids in encode_text(small_store.tokenizer, segments):
        expected_ids += [encoder.meta_token_id, *ids]

    example = encode_example(encoder, segments, completion)
    path = tmp_path_factory.getbasetemp() / "example.jsonl"
    path.write_text(json.dumps(example.to_record()) + "\n", encoding="utf-8")

    assert encoder.encode_prompt(segments) == expected_ids[1:]
    assert list(example.input_ids).count(encoder.meta_token_id) == len(segments) - 1
    if example.prompt:
        assert read_examples(path, small_store.tokenizer) == [example]
