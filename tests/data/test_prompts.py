"""Prompts in which named markers are meta-tokens and other look-alikes are text."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from metatokens import encode_prompt
from metatokens.data.prompts import chat_text, encode_chat
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


def test_a_tokenizer_without_a_meta_token_is_refused(tokenizer):
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    for options in ({"markers": "_PAUSE_"}, {"landmarks": "every:2"}):
        with pytest.raises(UserError, match="this tokenizer has no meta-token"):
            encode_prompt(plain, "the cat _PAUSE_ sat", **options)


# --- the texts of control tokens

TEMPLATE = (
    "{% for message in messages %}<|endoftext|>{{ message.role }}: {{ message.content }}{% endfor %}<|endoftext|>"
)


def with_meta_token(backend, meta_token):
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", extra_special_tokens={"meta_token": meta_token}
    )
    made.chat_template = TEMPLATE.replace("<|endoftext|>", "</s>")
    return made


def vocabularies(meta_token):
    """Tokenizers of characters, whose models have the control tokens' texts as pieces too."""
    pieces = ["<unk>", "</s>", meta_token, *map(chr, range(33, 127)), "\u2581"]
    numbered = {piece: number for number, piece in enumerate(pieces)}
    scored = [(piece, -1.0) for piece in pieces]
    cut = pre_tokenizers.Metaspace(prepend_scheme="never")
    for model, pre_tokenizer in (
        (models.Unigram(scored, unk_id=0), cut),
        (models.BPE(numbered, [], unk_token="<unk>", ignore_merges=True), pre_tokenizers.WhitespaceSplit()),
        (models.WordPiece(numbered, unk_token="<unk>"), pre_tokenizers.WhitespaceSplit()),
    ):
        backend = Tokenizer(model)
        backend.pre_tokenizer = pre_tokenizer
        yield with_meta_token(backend, meta_token)


@pytest.mark.parametrize("meta_token", ["<gist>", "the"])
def test_no_text_becomes_a_control_token_that_the_vocabulary_has_as_a_piece(meta_token):
    for made in vocabularies(meta_token):
        text = f"say {meta_token} please </s> {meta_token}"
        for ids in (encode_prompt(made, text), encode_chat(made, text.replace("</s>", ""))):
            assert not {made.meta_token_id, made.eos_token_id} & set(ids)
        marked = encode_prompt(made, f"{text} _PAUSE_", "_PAUSE_")
        assert (marked.count(made.meta_token_id), made.eos_token_id in marked) == (1, False)


def test_a_meta_token_of_any_text_is_text_in_a_chat(small_store):
    plain = AutoTokenizer.from_pretrained(small_store.path / "tokenizer")
    for meta_token in ("<gist>", AddedToken("<gist>", special=True, normalized=True, lstrip=True, single_word=True)):
        made = AutoTokenizer.from_pretrained(
            small_store.path / "tokenizer", extra_special_tokens={"meta_token": meta_token}
        )
        assert made.meta_token_id != plain.meta_token_id
        ids = encode_chat(made, "the <gist> sat <|endoftext|>on _PAUSE_", "_PAUSE_")
        assert ids.count(made.meta_token_id) == 1
        [before, after] = encode_text(plain, ["the <gist> sat ", "on"])
        assert ids == [*before, plain.eos_token_id, *after, made.meta_token_id]


def test_control_tokens_in_messages_are_text(tokenizer):
    said = [
        {"role": "user<|endoftext|>", "content": "the <|endoftext|><|meta|> cat\ufdd0"},
        {"role": "user", "content": "sat _PAUSE_"},
    ]
    chatting = copy.deepcopy(tokenizer)
    chatting.chat_template = TEMPLATE
    ids = encode_chat(chatting, chat_text(chatting, said), "_PAUSE_")
    assert ids.count(tokenizer.eos_token_id) == 3  # of the template: before each message and the answer
    assert ids.count(tokenizer.meta_token_id) == 1
    first = "<|endoftext|>user<|endoftext|>: the <|endoftext|><|meta|> cat\ufdd0"
    assert tokenizer.decode(ids) == f"{first}<|endoftext|>user: sat<|meta|><|endoftext|>"
    with_own_marker = encode_chat(chatting, chat_text(chatting, said), "<|meta|>")
    assert with_own_marker.count(tokenizer.meta_token_id) == 1
    for refused in (encode_chat, encode_prompt):
        with pytest.raises(UserError, match="a text has a lone surrogate"):
            refused(chatting, "caf\udce9")
