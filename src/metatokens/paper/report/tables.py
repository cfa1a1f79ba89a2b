"""The tables of the report. A method of `Tables` makes one table; without data it has no rows."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Any

import numpy as np
import pandas as pd

from metatokens.paper.frame import RATES, SPEEDS, Inputs, learned_from, learning_curves
from metatokens.paper.report.paper import first_token_ratio, paper_table
from metatokens.paper.report.table import POSITIONS, Cell, Fields, Table, models, order, plain, tabulate
from metatokens.paper.report.text import NOT_RUN, PERCENT, TOKENS_RIGHT, Form, duration, name, number

LENGTH_TABLES = {"list_recall": 7, "segment_counting": 8, "parity": 9, "copying": 10}
ABLATION_TABLES = {"list_recall": (11, 15), "segment_counting": (12,), "parity": (13,), "copying": (14, 16)}
BY_LENGTH_TABLES = {"list_recall": (17, 2)}  # of ablations at other lengths than the train length
INTERVENTIONS = {"": "unchanged", "no_pos": "no position", "no_embed": "no embedding", "neither": "neither"}
CONDITIONS = {
    "paper": "marked",
    "landmark": "landmarks",
    "decoy": "decoys",
    "long_prompt": "long prompts",
    "none": "no meta-tokens",
}
LONGEST = 512  # tokens: our train length next to the GPT-Neo of the paper, which has none
WINDOWS = {"yarn4": 4096, "yarn8": 8192}  # the paper's, in tokens
DISTANCES = (1, 2, 3, 4, 8, 16, 32)  # tokens before a meta-token
MODULES = {"attention": "attention", "second_attention": "second attention"}
ALONE = "landmarks_alone"  # an intervention
RECIPES = {"half-rate": "half the rate", "twice-rate": "twice the rate", "longer": "three times the steps"}
FACTS = {"facts_1": "one fact", "facts_2": "two facts", "facts_4": "four facts", "facts_8": "eight facts"}
KEYS = ("earlier_meta", "before_meta", "after_meta", "itself", "near", "first", "other")
PLACES = {"last meta-token": ("meta", ""), "no position": ("meta", "no_pos"), "text before it": ("text", "")}
SPLITS = {"held_out": "held out", "fit": "as the paper, on the 50 fitted"}
STEPS = Form("Training steps", is_log=True)
PERPLEXITY = Form("Perplexity", digits=1, counted="text tokens", chance="token frequencies alone")
COSINE = Form("Cosine, centred", digits=3, counted="values")
NATS = Form("Change, in nats", digits=3, counted="values")
SHARE = Form("Share, in %", 100.0, 1, counted="values")
DISTORTION = Form("Distortion, in nats", digits=3, counted="fits")


@dataclass(frozen=True)
class Tables:
    """The tables of a run; `by_seed` adds the figure of each run to its cell."""

    inputs: Inputs
    by_seed: bool = False

    @cached_property
    def tasks(self) -> dict[str, Fields]:
        """The tasks, each with the fields of its main figures: how the models were trained, on prompts of that kind."""
        found = self._accuracies()
        return {task: _main(found[found["task"] == task]) for task in sorted(set(found["task"]), key=order)}

    @cached_property
    def variants(self) -> list[tuple[str, str]]:
        """The variants of models, each with a task that it was tested on."""
        found = self._accuracies(variant=self._any("variant"))
        pairs = set(zip(found["variant"], found["task"], strict=True))
        return sorted((variant, task) for variant, task in pairs if variant)

    def each(self, what: str, *arguments: Any) -> list[Table]:
        """A kind of table for each task that has it."""
        return [table for task in self.tasks if (table := getattr(self, what)(task, *arguments)).rows]

    def learned(self) -> Table:
        """Each model on each task at the train length, on other kinds of prompts, and trained among landmarks."""
        rows: dict[str, Fields] = {}
        for task, about in self.tasks.items():
            rows[name(task)] = about
            for own in self._others(task):
                at = "" if own["length"] == about["length"] else f", {_length(own['length'])} tokens"
                kind = CONDITIONS.get(own["condition"], own["condition"])
                what = "trained among landmarks" if own["variant"] else kind
                rows[f"{name(task)}, {what}{at}"] = {**about, **own}
        tested = {model for about in self.tasks.values() for model in self.found(about)["model"]}
        return self._table("", "task", rows, {model: {"model": model} for model in sorted(tested, key=order)})

    def _others(self, task: str) -> list[Fields]:
        """In which other conditions the task was measured: the longest of long prompts, else the shortest."""
        about = self.tasks[task]
        same = _without(about, "condition", "train_condition", "length", "variant", "metric")
        found = self._accuracies(**same, variant=["", "landmark"])
        plain_ones = (found["variant"] == "") & (found["train_condition"] == about["train_condition"])
        is_other = np.where(plain_ones, found["condition"] != about["condition"], found["condition"] == "landmark")
        rows: dict[tuple[str, ...], Fields] = {}
        for row in _distinct(found[is_other], ["variant", "condition", "train_condition", "length"]):
            key = row["variant"], row["condition"]
            if key not in rows or row["condition"] == "long_prompt":
                rows[key] = row
        return [*rows.values()]

    def by_length(self, task: str, form: Form = PERCENT) -> Table:
        """Tables 7 to 10, Figure 1: each model by the length of its prompts; the paper's figure below ours."""
        about = {key: self.tasks[task][key] for key in ("task", "condition", "train_condition", "variant")}
        below = _papers(LENGTH_TABLES.get(task) if form == PERCENT else None)
        return self._by(about, name(task), ["length"], form, below=below)

    def other_prompts(self, task: str, variant: str = "", form: Form = PERCENT) -> Table:
        """Each model on the other kinds of prompts, by length; of a variant, on all that it was tested on."""
        about = self.tasks[task]
        conditions = [one for one in self._any("condition") if variant or one != about["condition"]]
        trained = self._any("train_condition") if variant else about["train_condition"]
        where = {"task": task, "variant": variant, "train_condition": trained, "condition": conditions}
        return self._by(where, f"{name(task)}, {variant or 'other prompts'}", ["condition", "length"], form)

    def other_recipes(self, task: str) -> Table:
        """Each model with other learning rates, and with more steps, at the train length."""
        rows = {label: _without(row, "variant") for label, row in models(self.inputs, **self.tasks[task]).items()}
        columns = {what: {"variant": kind} for kind, what in RECIPES.items() if (kind, task) in self.variants}
        return self._table(name(task), "model", rows if columns else {}, {"as above": {"variant": ""}, **columns})

    def _by(self, about: Fields, title: str, keys: list[str], form: Form, **options: Any) -> Table:
        """A row for each model with these fields, a column for each combination of keys that was measured."""
        about = {**about, "metric": "token_accuracy" if form == TOKENS_RIGHT else "exact_match"}
        columns = {", ".join(map(_heading, row.items())): row for row in _distinct(self.found(about), keys)}
        rows = {label: _without(row, *keys) for label, row in models(self.inputs, **about).items()}
        return self._table(title, "model", rows, columns, form=form, **options)

    def sooner(self) -> Table:
        """Training steps until a task is learned: the first measurement from which accuracy stays at 90 % or more."""
        never = Counter(
            (task, model, place)
            for (task, model, place, _), points in learning_curves(self.inputs.curves).items()
            if not np.isfinite(learned_from(points))
        )

        def below(fields: Fields) -> list[str]:
            count = never[fields["task"], fields["model"], fields["position_embedding"]]
            return [f"{count} not learned"] if count else []

        rows = models(self.inputs, metric="log_steps_to_learn")
        columns = {name(task): {"task": task} for task in self.tasks}
        return self._table("", "model", rows, columns, form=STEPS, below=below)

    def yarn(self, task: str) -> Table:
        """Table 1: exact match by length of models whose window was extended; token accuracy and the paper's below."""
        about = {"metric": "exact_match", "task": task, "variant": [*WINDOWS]}

        papers = _papers(1, scale=self.inputs.scale)

        def below(fields: Fields) -> list[str]:
            tokens = Cell.of(self.found({**fields, "metric": "token_accuracy"}))
            own = [f"tokens {PERCENT(tokens.estimate()[0])}"] if tokens.runs else []
            return own + papers(fields)

        columns = {number(row["length"]): row for row in _distinct(self.found(about), ["length"])}
        return self._table(name(task), "model", models(self.inputs, **about), columns, below=below)

    def ablations(self, task: str, every: bool = False) -> Table:
        """Tables 2 and 11 to 17: what is taken from the meta-tokens, or noise on positions; the paper's below ours.

        At the train length, or at every length.
        """
        kinds = [one for one in self._any("intervention") if one not in ("", ALONE)]
        about = {"metric": "exact_match", "task": task, "intervention": kinds}
        found = self.found(about)
        lengths = [row for row in _distinct(found, ["train_length", "length"]) if every or len({*row.values()}) == 1]
        rows = {
            f"{label}, {_length(at['train_length'])} \u2192 {_length(at['length'])}": {
                **_without(row, "intervention"),
                **at,
            }
            for at in lengths
            for label, row in models(self.inputs, **about, **at).items()
        }
        shown = ["", *sorted(set(found["intervention"]), key=order)] if len(found) else []
        columns = {_intervention(kind): {"intervention": kind} for kind in shown}
        at_train, elsewhere = _papers(*ABLATION_TABLES.get(task, ())), _papers(*BY_LENGTH_TABLES.get(task, ()))

        def below(fields: Fields) -> list[str]:
            return (at_train(fields) if fields["length"] == fields["train_length"] else []) or elsewhere(fields)

        return self._table(name(task), "model", rows, columns, below=below)

    def held(self) -> Table:
        """How much is recalled through landmarks alone; with all text in sight, where a model was tested so too."""
        found = self._accuracies(variant=self._any("variant"), intervention=ALONE)
        rows: dict[str, Fields] = {}
        for row in _distinct(found, ["condition", "task", "variant", "train_condition", "train_length", "length"]):
            facts, place = FACTS.get(row["condition"]), ", landmarks" if row["condition"] == "landmark" else ""
            label = f"{facts} per landmark" if facts else f"{name(row['task'])}{place}"
            alone, in_sight = {**row, "intervention": ALONE}, {**row, "intervention": ""}
            if len(self.found(in_sight)):
                label += ", trained with all text in sight"
                rows[f"{label}, tested likewise"] = in_sight
            rows[f"{label}, {PERCENT(self.found(alone)['kv_kept'].mean())} % of the KV"] = alone
        return self._table("", "", rows, {model: {"model": model} for model in sorted(set(found["model"]), key=order)})

    def perplexity(self) -> Table:
        """The perplexity of text, with and without meta-tokens inserted."""
        about = {"metric": "perplexity", "text": self._any("text"), "variant": self._any("variant")}
        places = _distinct(self.found(about), ["text", "condition"])
        columns = {f"{name(at['text'])}, {_placed(at['condition'])}": at for at in places}
        rows = {label: _without(row, "text") for label, row in models(self.inputs, **about).items()}
        return self._table("", "model", rows, columns, form=PERPLEXITY)

    def shortcuts(self) -> Table:
        """The score of each shortcut."""
        about = {"metric": "shortcut"}
        found = self.found(about)
        kinds = _distinct(found, ["task", "condition", "model"])
        rows = {f"{name(one['task'])}, {one['condition']}: {one['model']}": {**about, **one} for one in kinds}
        columns = {number(row["length"]): row for row in _distinct(found, ["length"])}
        return tabulate(self.inputs, "", "shortcut", rows, columns, form=Form("Exactly right, in %", 100.0, 1))

    def sharpness(self) -> Table:
        """Figure 2, left and middle: what the meta-tokens' embeddings change."""
        seen = {"logit": "logit at a meta-token", "log_odds": "log-odds at it", "entropy": "entropy"}
        output = {"top_logit": "top output logit", "answer_logit": "the answer's logit", "entropy": "output entropy"}
        places = {"context": "within the prompt", "final": "at its end"}
        rows: dict[str, Fields] = {
            f"{which}: {what}": {"metric": f"attention_{change}_change", "module": module, "layer": None}
            for (module, which), (change, what) in product(MODULES.items(), seen.items())
        }
        rows |= {
            f"{what} {place}": {"metric": f"output_{change}_change", "marker": marker}
            for (change, what), (marker, place) in product(output.items(), places.items())
        }
        return self._inside("output_entropy_change", rows, NATS)

    def premise(self) -> Table:
        """Theorem 4.1: where its premise holds, and whether the entropy fell."""
        rows: dict[str, Fields] = {}
        for module, which in MODULES.items():
            about: Fields = {"module": module, "layer": None}
            rows[f"{which}: rows with \u03b1 > exp(\u2212H)"] = {"metric": "premise_holds", **about}
            for premise, boosted in product((True, False), repeat=2):
                held, key = "held" if premise else "missing", "boosted" if boosted else "not boosted"
                own = {"metric": "entropy_fell", "premise": premise, "boosted": boosted}
                rows[f"{which}, premise {held}, key {key}: entropy fell"] = {**own, **about}
        return self._inside("output_entropy_change", rows, SHARE)

    def caching(self) -> Table:
        """Figure 2, right: the cosine of a meta-token, and of the text before it, with the tokens before."""
        about: dict[str, Any] = {"metric": "similarity_centred", "marker": "context"}
        about["layer"] = self.found(about)["layer"].max()
        rows: dict[str, Fields] = {
            f"{distance} before, {what}": {**about, "distance": distance, "subject": subject}
            for distance, (subject, what) in product(DISTANCES, {"meta": "meta-token", "text": "text control"}.items())
        }
        return self._inside("similarity_centred", rows, COSINE)

    def attention_of_final(self) -> Table:
        """Figure 3, left: what the final meta-token attends to; below it, what even attention would give."""
        rows: dict[str, Fields] = {
            f"{which}: {keys.replace('_', ' ')}": {"metric": "attention_weight", "module": module, "keys": keys}
            for (module, which), keys in product(MODULES.items(), KEYS)
        }

        def below(fields: Fields) -> list[str]:
            even = Cell.of(self.found({**fields, "metric": "attention_weight_if_uniform"}))
            return [f"evenly {SHARE(even.estimate()[0])}"] if even.runs else []

        return self._inside("attention_weight", rows, SHARE, below=below)

    def _inside(self, metric: str, rows: Mapping[str, Fields], form: Form, **options: Any) -> Table:
        """A column for each model that has figures of this metric."""
        columns = {label: _without(row, "metric") for label, row in models(self.inputs, metric=metric).items()}
        return self._table("", "", rows, columns, form=form, **options)

    def rate_distortion(self) -> Table:
        """Figure 3, right: the distortion at some rates."""
        rows: dict[str, Fields] = {
            f"{SPLITS[split]}: {model}, {place}": {
                "metric": "distortion_at_rate", "model": model, "split": split, "subject": subject,
                "intervention": what,
            }
            for split, (place, (subject, what)), model in product(SPLITS, PLACES.items(), ("gpt2", "twin", "meta"))
        }  # fmt: skip
        columns = {f"{rate:g} nats": {"rate": rate} for rate in RATES}
        return self._table("", "scored, model, place", rows, columns, form=DISTORTION)

    def speed(self) -> Table:
        """Table 3: times in one run, side by side; the paper's code was dense."""
        papers = {
            ("decode", "dense, inserting", "gpt2"): paper_table(3).at(metric="slowdown", model="meta"),
            ("prefill", "dense", "gpt2"): first_token_ratio(),
        }
        rows = []
        for line in sorted(self.inputs.read.timings, key=lambda line: line.benchmark):
            if line.benchmark not in SPEEDS or line.against not in ("gpt2", "meta", "meta, inserting"):
                continue
            is_own, theirs = line.model == line.against, papers.get((line.benchmark, line.model, line.against))
            what = "decoding" if line.benchmark == "decode" else "the first token"
            ratio = f"{line.ratio:.3f} ({line.ratio_low:.3f} to {line.ratio_high:.3f})"
            rows.append(
                (
                    f"{what}, batch {line.batch}: {line.model}" + ("" if is_own else f" / {line.against}"),
                    number(line.text_tokens / line.seconds),
                    number(1000 * line.seconds) if line.benchmark == "prefill" else NOT_RUN,
                    NOT_RUN if is_own else ratio,
                    NOT_RUN if theirs is None else f"{theirs:.2f}",
                    NOT_RUN if is_own else f"{line.limit:.3f}",
                    number(line.n),
                )
            )
        header = ("what", "text tokens a second", "ms to the first token", "times as long")
        where = {f"{one.device}, {one.threads} threads, {one.dtype}" for one in self.inputs.read.timings}
        return Table("", (*header, "paper", "by operations", "rounds"), rows, "; ".join(sorted(where)))

    def papers(self, table: int) -> Table:
        """All of a table of the paper; our figure of the same setting, where there is one, above the paper's."""
        paper, scale = paper_table(table), self.inputs.scale if table == 1 else 1
        rows: dict[str, Fields] = {}
        for row in paper.rows:
            fields = {"model": "meta", **paper.fields, **row.fields}
            own: dict[str, Any] = {"train_length": fields.get("train_length", LONGEST) // scale}
            own |= {"length": own["train_length"]} if table in range(11, 17) else {}
            own_window = [variant for variant, window in WINDOWS.items() if window == fields.get("window")]
            own |= {"variant": own_window[0]} if own_window else {}
            rows[_paper_label(fields)] = {**_without(fields, "metric", "window"), **own}
        columns = {
            _paper_heading(one): {key: one[key] // scale if key == "length" else one[key] for key in one}
            for one in paper.columns
            if one.get("metric") != "gain"
        }
        title, below = f"Table {table}: {paper.title}", _papers(table, scale=scale)
        found = self._table(title, "model", rows, columns, below=below, whole=True)
        return replace(found, note=" ".join([found.note, *paper.notes]))

    def models(self) -> Table:
        """The models of a run, with their numbers of parameters."""
        infos = dict(chain.from_iterable(run.models.items() for run in self.inputs.read.runs))
        sizes = ((one, info.description, info.parameters) for one, info in infos.items())
        rows = [(one, what, NOT_RUN if size is None else number(size)) for one, what, size in sizes]
        return Table("", ("model", "what it is", "parameters"), rows)

    def cost(self) -> Table:
        """Core time and the number of stages, by what they did."""
        costs: dict[str, list[float]] = {}
        for stage in chain.from_iterable(run.stages for run in self.inputs.read.runs):
            costs.setdefault(stage.kind or "not named", []).append(stage.cost)
        every = {**costs, "in all": [*chain.from_iterable(costs.values())]} if costs else {}
        rows = [(kind, number(len(own)), duration(sum(own))) for kind, own in every.items()]
        return Table("", ("stages", "number", "core time"), rows)

    def settings(self) -> Table:
        """Commands, machines, versions and texts of the runs."""
        rows = list[tuple[str, str]]()
        for run in self.inputs.read.runs:
            facts: dict[str, Any] = {"command": run.command, "platform": run.platform, "cores": run.cores}
            facts |= {"python": run.python, **run.versions, "begun": run.created, "finished": run.finished}
            facts |= {f"corpus, {key}": value for key, value in run.corpus.items()}
            facts |= {} if run.wall_seconds is None else {"wall time": duration(run.wall_seconds)}
            rows += [(fact, str(value)) for fact, value in facts.items() if value is not None]
        return Table("", ("setting", "value"), rows)

    def _table(self, *arguments: Any, **options: Any) -> Table:
        return tabulate(self.inputs, *arguments, by_seed=self.by_seed, **options)

    def found(self, where: Fields) -> pd.DataFrame:
        """The figures that a selection selects."""
        return self.inputs.select(**where).dropna(subset=["value"])

    def _accuracies(self, **where: Any) -> pd.DataFrame:
        """The accuracies in every condition, of models that were trained in any."""
        return self.found({key: self._any(key) for key in ("condition", "train_condition")} | where)

    def _any(self, column: str) -> list[str]:
        return sorted(set(self.inputs.figures[column]))


def _main(found: pd.DataFrame) -> dict[str, Any]:
    """The fields of a task's main figures: trained on the paper's prompts, rotary positions, where there are such."""
    about: dict[str, Any] = {"metric": "exact_match", "variant": "", "task": found["task"].iloc[0]}
    for column, wanted in (("train_condition", "paper"), ("position_embedding", "rope"), ("condition", "")):
        values = sorted(set(found[column]), key=order)
        wanted = wanted or about["train_condition"]
        about[column] = wanted if wanted in values else values[0]
        found = found[found[column] == about[column]]
    about["train_length"] = plain(float(found["train_length"].min()))
    lengths = found["length"]
    about["length"] = plain(float(lengths[lengths == about["train_length"]].min()))
    return about if about["length"] is not None else {**about, "length": plain(float(lengths.min()))}


def _distinct(found: pd.DataFrame, keys: list[str]) -> list[dict[str, Any]]:
    """The combinations of values in these columns, each once, in order."""
    found = found[keys].drop_duplicates()
    rows = [{key: plain(value) for key, value in row.items()} for row in found.to_dict("records")]
    return sorted(
        rows, key=lambda row: [order(one) if isinstance(one, str) else (one or 0, "") for one in row.values()]
    )


def _without(fields: Fields, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in keys}


def _heading(column: tuple[str, Any]) -> str:
    key, value = column
    return _length(value) if key == "length" else CONDITIONS.get(value, str(value))


def _length(value: int | None) -> str:
    return "all lengths" if value is None else number(value)


def _intervention(kind: str) -> str:
    return INTERVENTIONS.get(kind, kind.replace(":", " "))


def _placed(condition: str) -> str:
    return "alone" if condition == "none" else f"meta-tokens {condition}"


def _papers(*tables: int | None, scale: int = 1) -> Callable[[Fields], list[str]]:
    """The line below a figure: the paper's figure, from the first of these tables that has it.

    Its prompts are `scale` times as long as ours.
    """
    found = [paper_table(one) for one in tables if one is not None]

    def below(fields: Fields) -> list[str]:
        asked = {"intervention": "", **_without(fields, "metric")}
        asked |= {key: scale * asked[key] for key in ("train_length", "length") if asked.get(key)}
        asked |= {"window": WINDOWS[asked["variant"]]} if asked.get("variant") in WINDOWS else {}
        numbers = (one.at(**asked) for one in found)
        theirs = next((one for one in numbers if one is not None), None)
        return [] if theirs is None else [f"paper {theirs:.1f}"]

    return below


def _paper_heading(column: Fields) -> str:
    return number(column["length"]) if "length" in column else _intervention(column["intervention"])


def _paper_label(fields: Fields) -> str:
    words = [fields["model"], POSITIONS[fields["position_embedding"]]]
    words += [name(fields["task"])] if "window" in fields else []
    said = {"window": "window {:,}", "train_length": "to {:,}", "length": "at {:,}"}
    return ", ".join([*words, *(form.format(fields[key]) for key, form in said.items() if key in fields)])
