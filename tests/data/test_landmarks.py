"""The rules for landmarks against slow rules over characters, with four kinds of tokenizers."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import metatokens
from metatokens import Landmarks, encode_prompt
from metatokens.data.landmarks import AFTER, BEFORE
from metatokens.data.tokenizer import META_TOKEN, encode_text, load_tokenizer
from metatokens.errors import UserError

RULES = ("line", "paragraph", "sentence")
WHITE = "".join(filter(str.isspace, map(chr, range(sys.maxunicode + 1))))
MARKS, FULL_WIDTH_MARKS, CLOSING = (
    ".!?\u2026",
    "\u3002\uff01\uff1f",
    "\"')]\u2019\u201d\u00bb\u300d\u300f",
)
TEXTS = [
    "Dr. Li read it.\n\nIt ends. \r\n\r\nHe said: \u201cGo!\u201d she did\n\n\nThe U.S. is big... Yes.\n",
    "A list:\n- one.\n- two!\n\n  \nJ. R. R. wept (twice.) It\u2019s Bob's. Don't. e.g. this? \u2026 No\u2026 So.\n\n",
]
# Texts are drawn from ends of units, what looks like one, and what surrounds them.
PARTS = [
    *".!?\u2026\u3002\uff01\"')]\u2019\u201d\u00bb\u300d \n\t\r\f\x00-_,:;",
    *(
        "\r\n",
        "\n\n",
        ".\n\n",
        " \n",
        "  ",
        "...",
        "\u00a0",
        "\u00a0\n",
        "\u3000",
        "\u2028",
        "\x85",
        "\x1d",
        "\u2003",
    ),
    *[
        "Mr",
        "Prof",
        "St",
        "Dr",
        "J",
        "e.g",
        "s",
        "I",
        "a",
        "it",
        "The",
        "word",
        "7",
        "1999",
        "é",
        "他",
        "_PAUSE_",
    ],
]
drawn = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


def ends_text(line):
    """Whether a line feed after the line ends it: it has text, and at most 32 bytes of white space behind it."""
    text = line.rstrip()
    blanks = line[len(text) :]
    return bool(text) and len(blanks.encode()) <= 32


def line_ends(text):
    ends, start = [], 0
    for line in text.split("\n")[:-1]:
        if ends_text(line):
            ends.append(start + len(line))
        start += len(line) + 1
    return ends


def paragraph_ends(text):
    ends, start, is_inside = [], 0, False
    for line in text.split("\n")[:-1]:
        is_short_blank = not line.strip() and len(line.encode()) <= 32
        if is_inside and is_short_blank:
            ends.append(start + len(line))
        is_inside = ends_text(line)
        start += len(line) + 1
    return ends


def sentence_ends(text):
    ends = []
    for position, mark in enumerate(text):
        if mark in FULL_WIDTH_MARKS:
            ends.append(closed_at(text, position))
        elif mark in MARKS:
            end = closed_at(text, position)
            if begins_a_sentence(text[end + 1 : end + 3]) and not (
                mark == "." and is_abbreviated(text[:position])
            ):
                ends.append(end)
    return ends


def closed_at(text, mark):
    """The last of up to three quotation marks and brackets that close behind a mark."""
    end = mark
    while end - mark < 3 and text[end + 1 : end + 2] and text[end + 1] in CLOSING:
        end += 1
    return end


def begins_a_sentence(behind):
    """Whether a sentence may begin behind a mark: after white space, and with no small letter."""
    is_apart = not behind or behind[0] in WHITE
    is_small = "a" <= behind[1:] <= "z"
    return is_apart and not is_small


def is_abbreviated(before):
    """Whether a text before a full stop ends in a title or an initial."""
    [word] = re.findall(r"[A-Za-z0-9_]+\Z", before) or [""]
    ahead = before[: len(before) - len(word)][-1:]
    is_apart = ahead != "'" and (ahead.isascii() or ahead.isspace())
    is_initial = len(word) == 1 and word.isalpha() and is_apart
    return is_initial or word in ("Mr", "Mrs", "Ms", "Dr", "St", "Prof")


ENDS = {"line": line_ends, "paragraph": paragraph_ends, "sentence": sentence_ends}


def example_tokenizer():
    return load_tokenizer(str(Path(metatokens.__file__).parent / "example"))


def with_meta_token(backend):
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", meta_token=META_TOKEN
    )


def like_llama_2():
    """Pieces with a letter for the space, and bytes for characters without a piece, such as a line feed."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    words = [
        "The word it ends. It is so! Mr. Li went (twice) in 1999 \"and\" 'or' on_ly a-z: 7;,?)]J."
    ] * 9
    backend.train_from_iterator(words, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    learned = json.loads(backend.to_str())["model"]
    tokens = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *learned["vocab"],
    ]
    merges = [tuple(pair) for pair in learned["merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend.model = models.BPE(
        vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return with_meta_token(backend)


def like_llama_3():
    """Bytes, cut so that punctuation and the line feeds after it may be one token."""
    backend = Tokenizer(models.BPE())
    cut = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(cut, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 20, trainer)
    assert {
        ".\u010a\u010a",
        "\u010a\u010a",
    } < backend.get_vocab().keys()  # of several line feeds
    return with_meta_token(backend)


@pytest.fixture(scope="module", params=["example", "gpt2", "llama_2", "llama_3"])
def tokenizer(request):
    if request.param == "gpt2":
        return load_tokenizer(str(request.getfixturevalue("shared_data") / "gpt2_tokenizer"))
    return {
        "example": example_tokenizer,
        "llama_2": like_llama_2,
        "llama_3": like_llama_3,
    }[request.param]()


def expected(tokenizer, text, rule):
    """Whether a meta-token goes after each token: after the last that has a part of an end's character."""
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    behind = [False] * len(encoding.ids)
    for end in ENDS[rule](text):
        tokens = [
            token for token, (start, stop) in enumerate(encoding.offsets) if start <= end < stop
        ]
        behind[tokens[-1]] = True
    return behind


def ids_of(tokenizer, text):
    [ids] = encode_text(tokenizer, [text])
    return ids


@pytest.mark.parametrize("rule", RULES)
@given(text=drawn)
def test_a_text_has_landmarks_where_a_slow_rule_over_characters_puts_them(text, rule, tokenizer):
    ids = ids_of(tokenizer, text)

    assert Landmarks(tokenizer, rule)(ids).tolist() == expected(tokenizer, text, rule)


@pytest.mark.parametrize("rule", [*RULES, "every:3"])
@given(text=drawn, start=st.integers(0, 150), size=st.integers(0, 60))
def test_a_part_of_a_text_has_the_landmarks_of_the_whole(text, start, size, rule, tokenizer):
    ids = ids_of(tokenizer, "The end. " + text + " \n" * 30 + text)
    landmarks = Landmarks(tokenizer, rule)
    end, before = start + size, max(0, start - BEFORE)

    around = landmarks(ids[before : end + AFTER], before)

    part = around[start - before :][:size]
    assert part.tolist() == landmarks(ids)[start:end].tolist()


@pytest.mark.parametrize("rule", [*RULES, "every:2"])
@given(segments=st.lists(drawn, min_size=1, max_size=4))
def test_meta_tokens_that_are_there_stay_and_change_nothing_for_the_text(segments, rule, tokenizer):
    landmarks, meta = Landmarks(tokenizer, rule), tokenizer.meta_token_id
    text, marked = [], []
    for ids in encode_text(tokenizer, segments):
        text += ids
        marked += [*ids, meta]
    expected_ids = []
    behind = iter(landmarks(text))
    for position, token in enumerate(marked):
        expected_ids.append(token)
        if token != meta and next(behind) and marked[position + 1] != meta:
            expected_ids.append(meta)

    assert landmarks.insert_into(marked) == expected_ids


def test_control_tokens_count_as_text_and_have_no_landmark_before_them(tokenizer):
    eos, meta = tokenizer.eos_token_id, tokenizer.meta_token_id
    first, blank_line, second = encode_text(tokenizer, ["It is. So.\n\n", "\n\n", " it"])
    lines, paragraphs = Landmarks(tokenizer, "line"), Landmarks(tokenizer, "paragraph")
    sentences, every = Landmarks(tokenizer, "sentence"), Landmarks(tokenizer, "every:1")

    assert not sentences([*ids_of(tokenizer, "So."), eos]).any()
    assert paragraphs.insert_into([*first, *second]) == [*first, meta, *second]
    assert paragraphs.insert_into([*first, eos, *second]) == [*first, eos, *second]
    assert paragraphs.insert_into([eos, *blank_line, *second]) == [
        eos,
        *blank_line,
        meta,
        *second,
    ]
    assert lines([eos, *blank_line, *second]).sum() == 1
    assert every.insert_into([eos, eos]) == [eos, meta, eos, meta]


def test_text_that_looks_like_control_tokens_is_text(tokenizer):
    text = f"So{META_TOKEN}{tokenizer.eos_token}\nit _PAUSE_\n"

    ids = encode_prompt(tokenizer, text, landmarks="line")

    assert ids.count(tokenizer.meta_token_id) == 2
    assert ids == Landmarks(tokenizer, "line").insert_into(ids_of(tokenizer, text))


@pytest.mark.parametrize("ids", [[[1, 2], [3, 4]], 5], ids=["batch", "number"])
def test_what_is_no_text_is_refused(ids, tokenizer):
    with pytest.raises(UserError, match="landmarks go into the ids of one text"):
        Landmarks(tokenizer, "every:2").insert_into(ids)


def test_a_tokenizer_that_drops_line_feeds_is_refused_where_a_rule_needs_them():
    words = {"</s>": 0, "owl": 1, " ": 2}
    tokenizer = with_meta_token(Tokenizer(models.WordLevel(words, unk_token="owl")))

    for rule in ("line", "paragraph"):
        with pytest.raises(UserError, match=f"landmarks by {rule} need white space that the token"):
            Landmarks(tokenizer, rule)
    for rule in ("sentence", "every:2"):
        Landmarks(tokenizer, rule)


def test_a_slow_tokenizer_is_refused():
    slow = ByT5Tokenizer(meta_token=META_TOKEN)

    for use in (partial(Landmarks, slow, "line"), partial(encode_prompt, slow, "a text")):
        with pytest.raises(UserError, match="ByT5Tokenizer is no fast tokenizer"):
            use()
