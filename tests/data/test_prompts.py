"""Prompts in which named markers are meta-tokens and other look-alikes are text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from metatokens import encode_prompt
from metatokens.data.tokenizer import encode_text
from metatokens.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(small_store):
    return AutoTokenizer.from_pretrained(small_store.path / "tokenizer")


def ids_of(tokenizer, *segments):
    """The ids of segments with a meta-token at each join."""
    ids = encode_text(tokenizer, [segments[0]])[0]
    for segment in segments[1:]:
        ids += [tokenizer.meta_token_id, *encode_text(tokenizer, [segment])[0]]
    return ids


def test_a_marker_takes_the_space_before_it(tokenizer):
    expected = ids_of(tokenizer, "the cat", " sat", "")
    assert encode_prompt(tokenizer, "the cat _PAUSE_ sat _PAUSE_", markers="_PAUSE_") == expected
    assert encode_prompt(tokenizer, "the cat_PAUSE_ sat_PAUSE_", markers="_PAUSE_") == expected
    assert encode_prompt(tokenizer, "the cat _PAUSE_ sat _PAUSE_", markers=[7, 19]) == expected
    assert encode_prompt(tokenizer, "the cat <|meta|> sat <|meta|>", markers="<|meta|>") == expected
    assert encode_prompt(tokenizer, "the cat (+) sat (+)", markers="(+)") == expected  # no pattern, but itself
    assert encode_prompt(tokenizer, "the  [M]\ncat", markers="[M]") == ids_of(tokenizer, "the ", "\ncat")


def test_what_no_marker_names_stays_text(tokenizer):
    text = "the cat _PAUSE_ sat<|meta|> on<|endoftext|> a mat"
    assert encode_prompt(tokenizer, text) == encode_text(tokenizer, [text])[0]
    assert tokenizer.meta_token_id not in encode_prompt(tokenizer, text)
    marked = encode_prompt(tokenizer, text, markers="_PAUSE_")
    assert marked == ids_of(tokenizer, "the cat", " sat<|meta|> on<|endoftext|> a mat")
    assert encode_prompt(tokenizer, "", markers="_PAUSE_") == []


@given(segments=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=4))
def test_offsets_and_string_agree(tokenizer, segments):
    if any("_PAUSE_" in segment for segment in segments):
        return
    text, offsets = segments[0], []
    for segment in segments[1:]:
        offsets.append(len(text))
        text += " _PAUSE_" + segment
    expected = ids_of(tokenizer, *segments)
    assert encode_prompt(tokenizer, text, offsets) == expected
    assert encode_prompt(tokenizer, text, "_PAUSE_") == expected


def test_landmarks_are_added_to_markers(tokenizer):
    meta = tokenizer.meta_token_id
    text = "owl _PAUSE_ robin.\nCrow _PAUSE_\nfinch"
    marked = encode_prompt(tokenizer, text, "_PAUSE_", landmarks="line")
    assert marked == ids_of(tokenizer, "owl", " robin.\n", "Crow", "\n", "finch")
    assert encode_prompt(tokenizer, text, "_PAUSE_", landmarks="sentence") == ids_of(
        tokenizer, "owl", " robin.", "\nCrow", "\nfinch"
    )
    [words] = encode_text(tokenizer, ["owl owl owl owl owl"])
    assert encode_prompt(tokenizer, "owl owl owl owl owl", landmarks=f"every:{len(words)}") == [*words, meta]


def test_text_that_utf_8_cannot_encode_is_refused(tokenizer):
    with pytest.raises(UserError, match="a text has a lone surrogate"):
        encode_prompt(tokenizer, "caf\udce9")


def test_a_tokenizer_without_a_meta_token_is_refused(tokenizer):
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    for options in ({"markers": "_PAUSE_"}, {"landmarks": "every:2"}):
        with pytest.raises(UserError, match="this tokenizer has no meta-token"):
            encode_prompt(plain, "the cat _PAUSE_ sat", **options)
