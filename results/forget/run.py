"""Landmarks are kept and text is forgotten, in SmolLM2-135M: what is still found, and what it costs.

    make .real/smollm2
    metatokens retrofit --model .real/smollm2 --heads 4 --head-size 16 --out runs/forget/base-meta
    metatokens retrofit --model .real/smollm2 --layers none --out runs/forget/base-tokens
    python -m results.forget.run --out runs/forget --train 'novels/*.txt.gz' c4_a.jsonl.gz \
        --held-out emma.txt.gz dracula.txt.gz c4_b.jsonl.gz

README.md has the arms, the measures and the rule of judgement. The same command goes on where it was cut off. Each arm
leaves a folder, the most important arms first; all lines of results are gathered in `OUT/results.jsonl.gz`.
"""

import argparse
import copy
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import DataCollatorForTokenClassification, set_seed

from metatokens.checkpoint import MANIFEST, load_model
from metatokens.cli.output import progress_bar
from metatokens.data.landmarks import Landmarks
from metatokens.data.tokenizer import load_tokenizer, meta_token_id
from metatokens.decoder import decoder_of, logits_at
from metatokens.evaluation.accuracy import TEST_SEED, shortcut_rates
from metatokens.evaluation.intervals import normal_interval, wilson_interval
from metatokens.files import write_whole
from metatokens.recipe import TrainingSettings
from metatokens.records import Result, pack_hits, stamped
from metatokens.retrofit import hooks
from metatokens.retrofit.text_window import apply_text_window
from metatokens.tasks import TASKS
from metatokens.tasks.example import Encoded
from metatokens.tasks.scoring import score
from metatokens.training.trainer import train
from results.forget.texts import FORMS, TASK_LENGTH, Mixture, Texts

SINKS = 4
BATCH = 16
BRIEF = {"steps": 120, "batch": 4}  # what one core trains in half an hour
# The blocks that need the text most, and two that do not (layers.py).
RETRIEVE, OTHER = (
    (18, 23),
    (9, 20),
)
AT_ONCE = 512  # tokens of a text that are read in one forward pass
# By the share that is kept, one in so many: the rule for landmarks, and the characters of the separators.
LANDMARKS = {4: "every:8", 8: "every:16", 16: "every:32"}
SEPARATORS = {4: ".,;:?!\n", 8: ".?!", 16: "\n"}


@dataclass(frozen=True)
class Arm:
    """What is kept of a text, and how the model is trained for it."""

    name: str  # meta, tokens: landmarks with or without meta-attention; separators; window; or full
    share: int  # one in so many of the keys and values of a text of the train length is kept
    steps: int  # 0: untrained
    seed: int = 0
    rule: str = ""  # of landmarks, unless it is that of LANDMARKS
    teacher: bool = False  # the loss is the divergence from the base
    prose: bool = False  # trained on prose alone
    full: tuple[int, ...] = ()  # the blocks that keep all text
    batch: int = BATCH  # texts of a step

    @property
    def recipe(self) -> str:
        """The arm, except for its seed."""
        kind = [
            self.name,
            f"1-{self.share}",
            self.rule,
            "teacher" * self.teacher,
            "prose" * self.prose,
        ]
        kind += ["untrained" * (not self.steps)]
        kind += [
            "-".join(["full", *map(str, self.full)]) if self.full else "",
            "brief" * (self.batch != BATCH),
        ]
        return "-".join(filter(None, kind))

    @property
    def kept(self) -> str | None:
        """The rule of its landmarks, or the characters of its separators."""
        rules = {"meta": LANDMARKS, "tokens": LANDMARKS, "separators": SEPARATORS}
        return self.rule or rules.get(self.name, {}).get(self.share)


def plan(steps: int) -> Iterator[Arm]:
    """All arms, the most important first."""
    yield from (Arm("full", 1, 0), *(Arm("window", share, 0) for share in (8, 4, 16)))
    for seed in (0, 1):
        yield from (Arm(name, 8, steps, seed, rule="sentence") for name in ("tokens", "meta"))
        yield from (
            Arm(name, 8, steps, seed) for name in ("window", "tokens", "meta", "separators")
        )
        if seed == 0:
            yield Arm("full", 1, steps)
            yield from (
                Arm(name, 8, steps, rule="sentence", teacher=True) for name in ("tokens", "meta")
            )
    yield Arm("window", 8, 0, full=RETRIEVE)
    for seed in (0, 1):
        brief = {"share": 8, "seed": seed, **BRIEF}
        yield from (Arm("window", full=full, **brief) for full in (RETRIEVE, (), OTHER))
        yield Arm("tokens", rule="sentence", full=RETRIEVE, **brief)
        yield Arm("full", **brief | {"share": 1})
    for teacher in (True, False):
        yield Arm("window", 8, **BRIEF, full=RETRIEVE, teacher=teacher, prose=True)
    for share in (4, 16):
        yield from (Arm(name, share, steps) for name in ("tokens", "meta", "window", "separators"))


def keep_separators(decoder: Any, ids: list[int]) -> None:
    """Have a retrofitted decoder keep these tokens of the text as it keeps meta-tokens (SepLLM's rule)."""
    visibility_of_pass = hooks._visibility

    def note(decoder: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        decoder.read_ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]

    def see_others(decoder: Any, is_meta: torch.Tensor, *inputs: Any) -> Any:
        if hasattr(decoder, "kept_ids"):
            is_meta = torch.isin(decoder.read_ids, decoder.read_ids.new_tensor(decoder.kept_ids))
        return visibility_of_pass(decoder, is_meta, *inputs)

    decoder.kept_ids = ids
    decoder.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    hooks._visibility = see_others


def read(model: Any, ids: list[int]) -> Any:
    """The cache that holds a text, read by chunks."""
    cache = None
    for start in range(0, len(ids), AT_ONCE):
        chunk = torch.tensor([ids[start : start + AT_ONCE]], device=model.device)
        cache = model(
            chunk, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).past_key_values
    return cache


class Run:
    """One arm: its text, its window, its training and its measures."""

    def __init__(self, arm: Arm, options: argparse.Namespace, texts: Texts):
        self.arm, self.options, self.texts, self.tokenizer = arm, options, texts, texts.tokenizer
        self.folder, self.meta = (
            options.out / f"{arm.recipe}-seed{arm.seed}",
            meta_token_id(texts.tokenizer),
        )
        self.base = options.out / ("base-meta" if arm.name == "meta" else "base-tokens")
        self.rule = (
            Landmarks(self.tokenizer, arm.kept) if arm.kept and arm.name != "separators" else None
        )

    def put(self, ids: Any, has_own: bool = False) -> list[int]:
        """A text with the arm's meta-tokens: those of its rule, or those that a task's prompt has."""
        if self.rule is None:
            return [token for token in ids if token != self.meta]
        return list(ids) if has_own else self.rule.insert_into(ids)

    @cached_property
    def kept_ids(self) -> list[int]:
        """The ids that are never forgotten."""
        if self.arm.name != "separators":
            return [self.meta]
        texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
        return [token for token, text in enumerate(texts) if set(text) & set(self.arm.kept or "")]

    @property
    def autocast(self) -> Any:
        """Where the measures compute in bfloat16, unless asked for float32."""
        return torch.autocast(self.options.device, torch.bfloat16, enabled=not self.options.float32)

    def held(self, ids: list[int], window: int | None) -> float:
        """How many entries a block's cache needs at the end of a text, in the mean of the blocks."""
        place, share = np.arange(len(ids)), len(self.arm.full) / self.options.blocks
        is_near = place >= len(ids) - (len(ids) if window is None else window)
        kept = np.isin(ids, self.kept_ids) | (place < SINKS) | is_near
        return float(share * len(ids) + (1 - share) * kept.sum())

    @cached_property
    def window(self) -> int | None:
        """The largest window with which, on average, the arm's share of a training text's entries is kept."""
        length, most = self.options.length, self.options.length // self.arm.share
        rows = [self.put(row) for row in self.texts.excerpts(100, length)]
        fits = (
            size
            for size in range(most, 0, -1)
            if np.mean([self.held(row, size) for row in rows]) <= most
        )
        return None if self.arm.share == 1 else next(fits)

    def model(self, folder: Path) -> Any:
        """The model in a folder, which forgets text as the arm does."""
        model = load_model(folder).to(self.options.device)
        bare = getattr(model, "get_base_model", lambda: model)()
        apply_text_window(bare, self.window, SINKS, self.arm.full)
        if self.arm.name == "separators":
            keep_separators(decoder_of(bare)[0], self.kept_ids)
        return model

    def train(self) -> None:
        """Train, unless that is done."""
        if self.arm.steps == 0 or (self.folder / MANIFEST).exists():
            return
        self.folder.mkdir(exist_ok=True)
        options, arm = self.options, self.arm
        settings = TrainingSettings(
            max_steps=arm.steps,
            per_device_train_batch_size=arm.batch,
            learning_rate=options.rate,
            min_learning_rate=options.rate / 20,
            warmup_steps=arm.steps // 20,
            weight_decay=0.0,
            save_steps=max(50, arm.steps // 15),
            dataloader_num_workers=options.readers,
            bf16=not options.float32,
            seed=arm.seed,
            use_cpu=options.device == "cpu",
            text_window=self.window,
            text_full_layers=list(arm.full) or None,
            teacher="base" if arm.teacher else None,
            lora_rank=16,
        )
        sizes = {
            "steps": arm.steps,
            "batch": arm.batch,
            "length": options.length,
            "beyond": options.beyond,
        }
        sizes |= {"seed": arm.seed, "prose": arm.prose}
        data, collator = Mixture(self.texts, self.put, **sizes), DataCollatorForTokenClassification
        set_seed(arm.seed)
        with progress_bar(arm.recipe) as progress:
            how = {"collator": collator(self.tokenizer), "progress": progress}
            train(self.model(self.base), data, self.tokenizer, settings, self.folder, **how)

    def measure(self, held_out: dict[str, Texts]) -> None:
        """Write the lines of results, unless they are there."""
        if (self.folder / "results.jsonl").exists():
            return
        self.folder.mkdir(exist_ok=True)
        model, first = (
            self.model(self.folder if self.arm.steps else self.base).eval(),
            next(iter(held_out.values())),
        )
        with torch.inference_mode(), self.autocast:
            measures = (
                self.predicted(model, held_out),
                self.found(model, first),
                self.tasks(model, first),
            )
            lines = [one.line() + "\n" for one in stamped(chain.from_iterable(measures))]
        write_whole(self.folder / "results.jsonl", "".join(lines).encode())

    def result(self, ids: list[int], **fields: Any) -> Result:
        """A result; the share that is kept of the last text is that of the same text without meta-tokens."""
        held, text = self.held(ids, self.window), sum(token != self.meta for token in ids)
        kept = {
            "kv_kept": round(held / text, 4),
            "kv_bytes": round(held * self.options.entry),
            "text_window": self.window,
        }
        about = {
            "model": self.arm.name,
            "recipe": f"forget/{self.arm.recipe}",
            "seed": self.arm.seed,
        }
        return Result(**about, **kept, condition=self.arm.kept, **fields)

    def rate(self, ids: list[int], hits: list[bool], **fields: Any) -> Result:
        """The share of questions that are answered exactly."""
        low, high = wilson_interval(sum(hits), len(hits))
        own = {
            "n": len(hits),
            "value": float(np.mean(hits)),
            "low": low,
            "high": high,
            "hits": pack_hits(hits),
        }
        return self.result(ids, metric="exact_match", **own, **fields)

    def predicted(self, model: Any, held_out: dict[str, Texts]) -> Iterator[Result]:
        """The perplexity of each excerpt: of the text tokens of its second half."""
        length = self.options.length
        for number, (name, text) in enumerate(
            (name, text)
            for name, texts in held_out.items()
            for text in texts.excerpts(self.options.excerpts, length)
        ):
            ids = torch.tensor(self.put(text), device=self.options.device)
            place = (ids != self.meta).nonzero()[length // 2 :, 0]
            chosen = torch.zeros_like(ids, dtype=torch.bool).index_fill(0, place - 1, True)
            logits = torch.cat([*logits_at(model, ids[None], chosen[None])]).float()
            loss = cross_entropy(logits, ids[place], reduction="none")
            mean = loss.mean().item()
            value, low, high = np.exp(
                [mean, *normal_interval(mean, loss.std().item() / len(loss) ** 0.5)]
            ).tolist()
            about = {
                "metric": "perplexity",
                "text": f"{name} {number}",
                "length": length,
                "n": len(loss),
            }
            yield self.result(ids.tolist(), **about, value=value, low=low, high=high)

    def found(self, model: Any, texts: Texts) -> Iterator[Result]:
        """The share of facts that are found, by the length of the text; of other forms, at the first length.

        A text is read once, into a cache that forgets; each of its questions goes on from a copy of that cache.
        """
        sizes = [*self.options.facts.items()]
        tests = [("facts", *size) for size in sizes] + [
            (form, *sizes[0]) for form in FORMS if form != "facts"
        ]
        for form, length, count in tests:
            hits, ids = [], []
            for text, questions in texts.tests(count, length, self.options.beyond, form):
                ids = self.put(text)
                cache = read(model, ids)
                for question, answer in questions:
                    asked = torch.tensor(
                        [[*self.put(text + question), *answer][len(ids) : -1]], device=model.device
                    )
                    given = {
                        "past_key_values": copy.deepcopy(cache),
                        "use_cache": True,
                        "logits_to_keep": len(answer),
                    }
                    hits.append(model(asked, **given).logits[0].argmax(dim=-1).tolist() == answer)
            yield self.rate(ids, hits, task=form, length=length)

    def tasks(self, model: Any, texts: Texts) -> Iterator[Result]:
        """The share of the prompts of each task that are answered exactly."""
        for name in TASKS:
            task, encoded = texts.task(name, TEST_SEED), []
            for example in (task.test(index, TASK_LENGTH) for index in range(self.options.prompts)):
                ids = self.put(example.input_ids, has_own=True)
                start = len(ids) - len(example.input_ids) + example.answer_start
                encoded.append(Encoded(input_ids=ids, answer_start=start))
            hits, _ = score(model, encoded)
            yield self.rate(ids, hits, task=name, length=TASK_LENGTH)


def shortcuts(texts: Texts, prompts: int) -> Iterator[Result]:
    """What rules that do not do a task answer of the same prompts."""
    for name in TASKS:
        task = texts.task(name, TEST_SEED)
        tests = {TASK_LENGTH: [task.test(index, TASK_LENGTH) for index in range(prompts)]}
        yield from shortcut_rates(
            name, "landmark", tests, texts.tokenizer, texts.documents, recipe="forget/shortcuts"
        )


def main() -> None:
    """Run what is left of the plan."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", nargs="+", required=True, help="corpora to train on")
    parser.add_argument(
        "--held-out", nargs="+", required=True, help="files to measure on; facts go into the first"
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        default=[""],
        help="only those whose folder's name begins so, in this order",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument(
        "--float32",
        action="store_true",
        help="in place of bfloat16, which some CPUs compute slowly",
    )
    parser.add_argument("--readers", type=int, default=0, help="further processes that make texts")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--length", type=int, default=512, help="tokens of a text in training")
    parser.add_argument(
        "--beyond", type=int, default=160, help="least tokens from a fact to the questions"
    )
    parser.add_argument("--excerpts", type=int, default=24, help="of each held-out file")
    parser.add_argument("--prompts", type=int, default=48, help="of each task")
    parser.add_argument(
        "--facts", default="512:192,1024:48,2048:48,4096:24,8192:24", help="questions by length"
    )
    given = parser.parse_args()
    given.facts = {
        int(length): int(count)
        for length, count in (one.split(":") for one in given.facts.split(","))
    }
    tokenizer, config = (
        load_tokenizer(str(given.out / "base-tokens")),
        load_model(given.out / "base-tokens").config,
    )
    given.blocks = config.num_hidden_layers
    # Bytes in bfloat16.
    given.entry = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    texts = Texts(tokenizer, given.train)
    held_out = {
        Path(spec).name.partition(".")[0]: Texts(tokenizer, [spec]) for spec in given.held_out
    }
    first = next(iter(held_out.values()))
    asked = {
        length: first.tests(count, length, given.beyond) for length, count in given.facts.items()
    }
    prose = {name: one.excerpts(given.excerpts, given.length) for name, one in held_out.items()}
    # For presses.py.
    write_whole(given.out / "texts.json", json.dumps({"asked": asked, "prose": prose}).encode())
    runs = [Run(arm, given, texts) for arm in plan(given.steps)]
    for run in (run for name in given.arms for run in runs if run.folder.name.startswith(name)):
        print(
            f"{run.folder.name}: {run.arm.kept!r}, {SINKS} sinks and a window of {run.window}",
            flush=True,
        )
        run.train()
        run.measure(held_out)
    rules = given.out / "shortcuts" / "results.jsonl"
    if not rules.exists():
        rules.parent.mkdir()
        found = (one.line() + "\n" for one in stamped(shortcuts(first, given.prompts)))
        write_whole(rules, "".join(found).encode())
    lines = b"".join(path.read_bytes() for path in sorted(given.out.glob("*/results.jsonl")))
    write_whole(given.out / "results.jsonl.gz", gzip.compress(lines, mtime=0))


if __name__ == "__main__":
    main()
