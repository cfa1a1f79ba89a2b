"""Prompts in which named markers are meta-tokens and other look-alikes are text."""

import copy

import pytest
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
    ids = []
    for segment_ids in encode_text(tokenizer, segments):
        ids += [tokenizer.meta_token_id, *segment_ids]
    return ids[1:]


@pytest.mark.parametrize(
    ("text", "markers"),
    [
        ("the cat _PAUSE_ sat _PAUSE_", "_PAUSE_"),
        ("the cat_PAUSE_ sat_PAUSE_", "_PAUSE_"),
        ("the cat _PAUSE_ sat _PAUSE_", [7, 19]),
        ("the cat <|meta|> sat <|meta|>", "<|meta|>"),
        ("the cat (+) sat (+)", "(+)"),  # no pattern, but itself
    ],
)
def test_a_marker_takes_the_space_before_it(text, markers, tokenizer):
    assert encode_prompt(tokenizer, text, markers=markers) == ids_of(
        tokenizer, "the cat", " sat", ""
    )


def test_what_no_marker_names_stays_text(tokenizer):
    text = "the cat _PAUSE_ sat<|meta|> on<|endoftext|> a mat"

    unmarked = encode_prompt(tokenizer, text)
    marked = encode_prompt(tokenizer, text, markers="_PAUSE_")

    assert unmarked == ids_of(tokenizer, text)
    assert tokenizer.meta_token_id not in unmarked
    assert marked == ids_of(tokenizer, "the cat", " sat<|meta|> on<|endoftext|> a mat")
    assert encode_prompt(tokenizer, "", markers="_PAUSE_") == []


@pytest.mark.parametrize(
    ("rule", "segments"),
    [
        ("line", ["owl", " robin.\n", "Crow", "\n", "finch"]),
        ("sentence", ["owl", " robin.", "\nCrow", "\nfinch"]),
    ],
)
def test_landmarks_are_added_to_markers(rule, segments, tokenizer):
    text = "owl _PAUSE_ robin.\nCrow _PAUSE_\nfinch"

    assert encode_prompt(tokenizer, text, "_PAUSE_", landmarks=rule) == ids_of(tokenizer, *segments)


@pytest.mark.parametrize("options", [{"markers": "_PAUSE_"}, {"landmarks": "every:2"}], ids=str)
def test_a_tokenizer_without_a_meta_token_is_refused(options, tokenizer):
    plain = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>"
    )

    with pytest.raises(UserError, match="this tokenizer has no meta-token"):
        encode_prompt(plain, "the cat _PAUSE_ sat", **options)


# --- the texts of control tokens

TEMPLATE = (
    "{% for message in messages %}<|endoftext|>{{ message.role }}: {{ message.content }}{% endfor %}"
    "<|endoftext|>"
)


def tokenizer_of_characters(kind, meta_token):
    """A tokenizer of characters, whose model has the control tokens' texts as pieces too."""
    letters = [chr(number) for number in range(33, 127)]
    pieces = ["<unk>", "</s>", meta_token, *letters, "\u2581"]
    numbered = {piece: number for number, piece in enumerate(pieces)}
    if kind == "unigram":
        backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    else:
        model = {
            "bpe": models.BPE(numbered, [], unk_token="<unk>", ignore_merges=True),
            "wordpiece": models.WordPiece(numbered, unk_token="<unk>"),
        }[kind]
        backend = Tokenizer(model)
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={"meta_token": meta_token},
    )
    tokenizer.chat_template = TEMPLATE.replace("<|endoftext|>", "</s>")
    return tokenizer


@pytest.mark.parametrize("meta_token", ["<gist>", "the"])
@pytest.mark.parametrize("kind", ["unigram", "bpe", "wordpiece"])
def test_no_text_becomes_a_control_token_that_the_vocabulary_has_as_a_piece(kind, meta_token):
    tokenizer = tokenizer_of_characters(kind, meta_token)
    control = {tokenizer.meta_token_id, tokenizer.eos_token_id}

    prompt = encode_prompt(tokenizer, f"say {meta_token} please </s> {meta_token}")
    chat = encode_chat(tokenizer, f"say {meta_token} please {meta_token}")
    marked = encode_prompt(tokenizer, f"say {meta_token} please </s> _PAUSE_", "_PAUSE_")

    assert control.isdisjoint(prompt)
    assert control.isdisjoint(chat)
    assert marked.count(tokenizer.meta_token_id) == 1
    assert tokenizer.eos_token_id not in marked


@pytest.mark.parametrize(
    "meta_token",
    [
        "<gist>",
        AddedToken("<gist>", special=True, normalized=True, lstrip=True, single_word=True),
    ],
    ids=["plain", "with options"],
)
def test_a_meta_token_of_any_text_is_text_in_a_chat(meta_token, small_store):
    folder = small_store.path / "tokenizer"
    plain = AutoTokenizer.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        folder, extra_special_tokens={"meta_token": meta_token}
    )
    assert tokenizer.meta_token_id != plain.meta_token_id

    ids = encode_chat(tokenizer, "the <gist> sat <|endoftext|>on _PAUSE_", "_PAUSE_")

    before, after = encode_text(plain, ["the <gist> sat ", "on"])
    assert ids == [*before, plain.eos_token_id, *after, tokenizer.meta_token_id]


@pytest.fixture
def chatting(tokenizer):
    """A tokenizer whose chat template has a control token before each message."""
    chatting = copy.deepcopy(tokenizer)
    chatting.chat_template = TEMPLATE
    return chatting


def test_control_tokens_in_messages_are_text(chatting):
    messages = [
        {"role": "user<|endoftext|>", "content": "the <|endoftext|><|meta|> cat\ufdd0"},
        {"role": "user", "content": "sat _PAUSE_"},
    ]
    text = chat_text(chatting, messages)

    ids = encode_chat(chatting, text, "_PAUSE_")
    with_another_marker = encode_chat(chatting, text, "<|meta|>")

    # Of the template: before each message and the answer.
    assert ids.count(chatting.eos_token_id) == 3
    assert ids.count(chatting.meta_token_id) == 1
    first = "<|endoftext|>user<|endoftext|>: the <|endoftext|><|meta|> cat\ufdd0"
    assert chatting.decode(ids) == f"{first}<|endoftext|>user: sat<|meta|><|endoftext|>"
    assert with_another_marker.count(chatting.meta_token_id) == 1


def test_landmarks_are_added_to_the_markers_of_a_chat(chatting):
    text = chat_text(chatting, [{"role": "user", "content": "owl _PAUSE_ robin.\nCrow"}])

    ids = encode_chat(chatting, text, "_PAUSE_", landmarks="line")

    expected = "<|endoftext|>user: owl<|meta|> robin.\n<|meta|>Crow<|endoftext|>"
    assert chatting.decode(ids) == expected
    assert ids.count(chatting.meta_token_id) == 2


def test_an_empty_marker_is_refused(chatting):
    for encode in (encode_chat, encode_prompt):
        with pytest.raises(UserError, match="the marker is empty"):
            encode(chatting, "the cat", "")


def test_a_lone_surrogate_is_refused(chatting):
    for encode in (encode_chat, encode_prompt):
        with pytest.raises(UserError, match="a text has a lone surrogate"):
            encode(chatting, "caf\udce9")
