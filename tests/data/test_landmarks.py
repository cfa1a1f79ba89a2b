"""The rules for landmarks against slow rules over characters, with four kinds of tokenizers."""

import json
import pickle
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import metatokens
from metatokens import Landmarks, encode_prompt
from metatokens.data.landmarks import AFTER, BEFORE
from metatokens.data.prompts import encode_chat
from metatokens.data.tokenizer import META_TOKEN, encode_text, load_tokenizer
from metatokens.errors import UserError
from metatokens.tasks.example import read_examples

RULES = ("line", "paragraph", "sentence")
WHITE = "".join(letter for letter in map(chr, range(sys.maxunicode + 1)) if letter.isspace())
TEXTS = [
    "Dr. Li read it.\n\nIt ends. \r\n\r\nHe said: \u201cGo!\u201d she did\n\n\nThe U.S. is big... Yes.\n",
    "A list:\n- one.\n- two!\n\n  \nJ. R. R. wept (twice.) It\u2019s Bob's. Don't. e.g. this? \u2026 No\u2026 So.\n\n",
]
# Texts are drawn from ends of units, what looks like one, and what surrounds them.
PARTS = [
    *".!?\u2026\u3002\uff01\"')]\u2019\u201d\u00bb\u300d \n\t\r\f\x00-_,:;",
    *("\r\n", "\n\n", ".\n\n", " \n", "  ", "...", "\u00a0", "\u00a0\n", "\u3000", "\u2028", "\x85", "\x1d", "\u2003"),
    *["Mr", "Prof", "St", "Dr", "J", "e.g", "s", "I", "a", "it", "The", "word", "7", "1999", "é", "他", "_PAUSE_"],
]
drawn = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


def ends_text(line: str) -> bool:
    """Whether a line feed after the line ends it: it has text, and at most 32 bytes of white space behind it."""
    text = line.rstrip()
    return bool(text) and len(line[len(text) :].encode()) <= 32


def line_ends(text: str) -> list[int]:
    ends, start = [], 0
    for line in text.split("\n")[:-1]:
        if ends_text(line):
            ends.append(start + len(line))
        start += len(line) + 1
    return ends


def paragraph_ends(text: str) -> list[int]:
    ends, start, is_inside = [], 0, False
    for line in text.split("\n")[:-1]:
        if is_inside and not line.strip() and len(line.encode()) <= 32:
            ends.append(start + len(line))
        is_inside = ends_text(line)
        start += len(line) + 1
    return ends


def sentence_ends(text: str) -> list[int]:
    ends = []
    for place, mark in enumerate(text):
        if mark not in ".!?\u2026\u3002\uff01\uff1f":
            continue
        end = place
        while end + 1 < len(text) and text[end + 1] in "\"')]\u2019\u201d\u00bb\u300d\u300f" and end - place < 3:
            end += 1
        if mark in "\u3002\uff01\uff1f":
            ends.append(end)
            continue
        behind, further = text[end + 1 : end + 2], text[end + 2 : end + 3]
        if (behind and behind not in WHITE) or (further and "a" <= further <= "z"):
            continue
        words = re.findall(r"[A-Za-z0-9_]+\Z", text[:place])
        word = words[0] if words else ""
        ahead = text[: place - len(word)][-1:]
        is_letter = len(word) == 1 and word.isalpha() and ahead != "'" and (ahead.isascii() or ahead.isspace())
        if mark == "." and (is_letter or word in ("Mr", "Mrs", "Ms", "Dr", "St", "Prof")):
            continue
        ends.append(end)
    return ends


ENDS = {"line": line_ends, "paragraph": paragraph_ends, "sentence": sentence_ends}


def example_tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(str(Path(metatokens.__file__).parent / "example"))


def with_meta_token(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", meta_token=META_TOKEN)


def like_llama_2() -> PreTrainedTokenizerFast:
    """Pieces with a letter for the space, and bytes for characters without a piece, such as a line feed."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    words = ["The word it ends. It is so! Mr. Li went (twice) in 1999 \"and\" 'or' on_ly a-z: 7;,?)]J."] * 9
    backend.train_from_iterator(words, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    learned = json.loads(backend.to_str())["model"]
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    merges = [tuple(pair) for pair in learned["merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend.model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return with_meta_token(backend)


def like_llama_3() -> PreTrainedTokenizerFast:
    """Bytes, cut so that punctuation and the line feeds after it may be one token."""
    backend = Tokenizer(models.BPE())
    cut = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(cut, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 20, trainer)
    assert {".\u010a\u010a", "\u010a\u010a"} < backend.get_vocab().keys()  # of several line feeds
    return with_meta_token(backend)


@pytest.fixture(scope="module", params=["example", "gpt2", "llama_2", "llama_3"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    if request.param == "gpt2":
        return load_tokenizer(str(request.getfixturevalue("shared_data") / "gpt2_tokenizer"))
    return {"example": example_tokenizer, "llama_2": like_llama_2, "llama_3": like_llama_3}[request.param]()


def expected(tokenizer: PreTrainedTokenizerBase, text: str, rule: str) -> list[bool]:
    """Whether a meta-token goes after each token: after the last that has a part of an end's character."""
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    behind = [False] * len(encoding.ids)
    for end in ENDS[rule](text):
        behind[max(token for token, (start, stop) in enumerate(encoding.offsets) if start <= end < stop)] = True
    return behind


@pytest.mark.parametrize("rule", RULES)
@given(text=drawn)
def test_a_text_has_landmarks_where_a_slow_rule_over_characters_puts_them(
    text: str, rule: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    [ids] = encode_text(tokenizer, [text])
    assert Landmarks(tokenizer, rule)(ids).tolist() == expected(tokenizer, text, rule)


@pytest.mark.parametrize("rule", RULES)
def test_written_text_has_them_too(rule: str, tokenizer: PreTrainedTokenizerBase) -> None:
    for text in TEXTS:
        [ids] = encode_text(tokenizer, [text])
        found = Landmarks(tokenizer, rule)(ids).tolist()
        assert sum(found) > 1
        assert found == expected(tokenizer, text, rule)
        again = pickle.loads(pickle.dumps(Landmarks(tokenizer, rule)))  # as it goes to a worker
        assert again(ids).tolist() == found


@pytest.mark.parametrize("rule", [*RULES, "every:3"])
@given(text=drawn, start=st.integers(0, 150), size=st.integers(0, 60))
def test_a_part_of_a_text_has_the_landmarks_of_the_whole(
    text: str, start: int, size: int, rule: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    [ids] = encode_text(tokenizer, ["The end. " + text + " \n" * 30 + text])
    landmarks, before = Landmarks(tokenizer, rule), max(0, start - BEFORE)
    around = landmarks(ids[before : start + size + AFTER], before)
    assert around[start - before :][:size].tolist() == landmarks(ids)[start : start + size].tolist()


@pytest.mark.parametrize("rule", RULES)
@given(white=st.sampled_from(WHITE), further=st.sampled_from(["", "a", "A", "\u00a0a"]))
def test_all_white_space_of_unicode_is_white_space(
    white: str, further: str, rule: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = f"It rains.{white}{further}\n{white}\nMr. Li,{white}J.{white}He reads.{white * 10}\n{white}\nSo.\n"
    [ids] = encode_text(tokenizer, [text])
    assert Landmarks(tokenizer, rule)(ids).tolist() == expected(tokenizer, text, rule)


@pytest.mark.parametrize(
    ("blanks", "lines"), [("\t\r" * 16, 3), ("\t\r" * 16 + "\t", 1), ("\u3000" * 10 + "\x85", 3), ("\u3000" * 11, 1)]
)
def test_a_line_may_end_in_32_bytes_of_blanks_of_which_a_part_sees_all(
    blanks: str, lines: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    [ids] = encode_text(tokenizer, [f"(Prof.{blanks}\n{blanks}\nOne.{blanks}\n{blanks}\nEnd\n"])
    assert len(ids) > BEFORE + AFTER
    for rule, count in (("line", lines), ("paragraph", lines - 1), ("sentence", 1)):
        landmarks = Landmarks(tokenizer, rule)
        whole = landmarks(ids).tolist()
        assert sum(whole) == count
        for place, is_end in enumerate(whole):
            before = max(0, place - BEFORE)
            assert landmarks(ids[before : place + 1 + AFTER])[place - before] == is_end


@pytest.mark.parametrize("rule", [*RULES, "every:2"])
@given(segments=st.lists(drawn, min_size=1, max_size=4))
def test_meta_tokens_that_are_there_stay_and_change_nothing_for_the_text(
    segments: list[str], rule: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    landmarks, meta = Landmarks(tokenizer, rule), tokenizer.meta_token_id
    ids = encode_text(tokenizer, segments)
    text = [token for part in ids for token in part]
    marked = [token for part in ids for token in (*part, meta)]
    expected: list[int] = []
    behind = iter(landmarks(text))
    for place, token in enumerate(marked):
        expected.append(token)
        if token != meta and next(behind) and marked[place + 1] != meta:
            expected.append(meta)
    assert landmarks.insert_into(marked) == expected


def test_control_tokens_count_as_text_and_have_no_landmark_before_them(tokenizer: PreTrainedTokenizerBase) -> None:
    eos, meta = tokenizer.eos_token_id, tokenizer.meta_token_id
    one, end, two = encode_text(tokenizer, ["It is. So.\n\n", "\n\n", " it"])
    lines, paragraphs = Landmarks(tokenizer, "line"), Landmarks(tokenizer, "paragraph")
    assert not Landmarks(tokenizer, "sentence")([*encode_text(tokenizer, ["So."])[0], eos]).any()
    assert paragraphs.insert_into([*one, *two]) == [*one, meta, *two]
    assert paragraphs.insert_into([*one, eos, *two]) == [*one, eos, *two]
    assert paragraphs.insert_into([eos, *end, *two]) == [eos, *end, meta, *two]
    assert lines([eos, *end, *two]).sum() == 1
    assert Landmarks(tokenizer, "every:1").insert_into([eos, eos]) == [eos, meta, eos, meta]


def test_a_chat_and_text_that_looks_like_control_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    eos, meta = tokenizer.eos_token, tokenizer.meta_token_id
    ids = encode_chat(tokenizer, f"One. Two _PAUSE_{eos}\n", "_PAUSE_", landmarks="sentence")
    shown = tokenizer.decode(ids).replace(" ", "")  # that of SentencePiece drops some around special tokens
    assert shown == f"One.{META_TOKEN}Two{META_TOKEN}{eos}\n"
    [text] = encode_text(tokenizer, [f"So{META_TOKEN}{eos}\nit _PAUSE_\n"])
    assert encode_prompt(tokenizer, f"So{META_TOKEN}{eos}\nit _PAUSE_\n", landmarks="line").count(meta) == 2
    assert Landmarks(tokenizer, "line").insert_into(text).count(meta) == 2


def test_records_have_them_in_their_prompts(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    record = {"prompt": "It is. So _PAUSE_\nit", "markers": [9], "completion": " The end. It is.\n"}
    (tmp_path / "own.jsonl").write_text(json.dumps(record))
    [plain] = read_examples(tmp_path / "own.jsonl", tokenizer)
    [filled] = read_examples(tmp_path / "own.jsonl", tokenizer, landmarks="sentence")
    prompt = list(plain.input_ids[: plain.answer_start])
    expected = Landmarks(tokenizer, "sentence").insert_into(prompt)
    assert expected.count(tokenizer.meta_token_id) == 2
    assert filled.input_ids == (*expected, *plain.input_ids[plain.answer_start :])
    assert filled.answer_start == filled.n_tokens == len(expected)
    assert (filled.prompt, filled.markers) == (plain.prompt, plain.markers)


def test_rows_that_have_no_token_are_no_text() -> None:
    """A base with spare rows may generate their ids."""
    tokenizer = like_llama_2()
    ids = [*tokenizer("The word ends. It is so!").input_ids, len(tokenizer), len(tokenizer) + 60]
    marks = Landmarks(tokenizer, "sentence")(ids)
    assert marks[:-2].tolist() == Landmarks(tokenizer, "sentence")(ids[:-2]).tolist()
    assert not marks[-2:].any()


def test_a_word_that_is_added_later_is_seen() -> None:
    tokenizer = like_llama_3()
    assert not Landmarks(tokenizer, "sentence")([5, 5]).any()
    tokenizer.add_tokens(["Stop. "])
    added = tokenizer.convert_tokens_to_ids("Stop. ")
    assert Landmarks(tokenizer, "sentence")([added, 5]).tolist() == [True, False]


def test_a_tokenizer_that_drops_what_a_rule_needs_is_refused() -> None:
    words = with_meta_token(Tokenizer(models.WordLevel({"one": 0, ".": 1, "</s>": 2}, unk_token="</s>")))
    for rule in ("line", "paragraph", "sentence"):
        with pytest.raises(UserError, match=f"landmarks by {rule} need white space that the tokenizer drops"):
            Landmarks(words, rule)
    assert Landmarks(words, "every:2")([0, 1, 0]).tolist() == [False, True, False]


def test_the_page_draws_what_the_rules_do() -> None:
    page = (Path(__file__).parents[2] / "docs/how_to/landmarks.md").read_text(encoding="utf-8")
    (drawing,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    tokenizer = example_tokenizer()
    rows = dict(line.split(maxsplit=1) for line in drawing.splitlines())
    text = rows.pop("text").replace("\u21b5", "\n")
    assert set(rows) == {*RULES, "every:8"}
    for rule, shown in rows.items():
        filled = Landmarks(tokenizer, rule).insert_into(encode_text(tokenizer, [text])[0])
        assert tokenizer.decode(filled).replace("\n", "\u21b5").replace(META_TOKEN, "\u25cf") == shown, rule
