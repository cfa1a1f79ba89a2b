"""The tables of the report. A method of `Tables` makes one table; without data it has no rows."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import nan
from typing import Any

import numpy as np
import pandas as pd

from metatokens.paper.frame import RATES, Inputs, learned_from, learning_curves
from metatokens.paper.records import Timing
from metatokens.paper.report.make_table import (
    POSITIONS,
    Cell,
    Fields,
    Selections,
    Table,
    in_order,
    make_table,
    models,
    order,
    plain,
    plain_rows,
)
from metatokens.paper.report.paper_numbers import paper_table
from metatokens.paper.report.text import (
    PAPER_TABLES,
    PERCENT,
    ROWS,
    TOKENS_RIGHT,
    WORDS,
    Form,
    name,
    number,
)

INTERVENTIONS, CONDITIONS, RECIPES = WORDS["interventions"], WORDS["conditions"], WORDS["recipes"]
LONGEST = 512  # tokens: our train length next to the GPT-Neo of the paper, which has none
WINDOWS = PAPER_TABLES["windows"]
ALONE = "landmarks_alone"  # an intervention
STEPS = Form("Training steps", is_log=True)
PERPLEXITY = Form("Perplexity", digits=1, counted="text tokens", chance="token frequencies alone")
COSINE = Form("Cosine, centred", digits=3, counted="values")
NATS = Form("Change, in nats", digits=3, counted="values")
SHARE = Form("Share, in %", 100.0, 1, counted="values")
DISTORTION = Form("Distortion, in nats", digits=3, counted="fits")

Lines = Callable[[Fields], list[str]]
"""The lines below a figure, from the fields of its cell."""


@dataclass(frozen=True)
class Tables:
    """The tables of a run; `by_seed` adds the figure of each run to its cell."""

    inputs: Inputs
    by_seed: bool = False

    @cached_property
    def tasks(self) -> dict[str, Fields]:
        """The tasks, each with the fields of its main figures: how the models were trained, on prompts of that kind."""
        accuracies = self._accuracies()
        return {
            task: _main_fields(accuracies[accuracies["task"] == task])
            for task in in_order(accuracies["task"])
        }

    @cached_property
    def variants(self) -> list[tuple[str, str]]:
        """The variants of models, each with a task that it was tested on."""
        accuracies = self._accuracies(variant=self._any("variant"))
        pairs = set(zip(accuracies["variant"], accuracies["task"], strict=True))
        return sorted((variant, task) for variant, task in pairs if variant)

    def each(self, table_name: str, *arguments: Any) -> list[Table]:
        """A kind of table for each task that has it."""
        tables = [getattr(self, table_name)(task, *arguments) for task in self.tasks]
        return [table for table in tables if table.rows]

    # --- Accuracies

    def learned(self) -> Table:
        """Each model on each task at the train length, on other kinds of prompts, and trained among landmarks."""
        rows: Selections = {}
        tested: set[str] = set()
        for task, main in self.tasks.items():
            tested.update(self.inputs.measured(**main)["model"])
            rows[name(task)] = main
            for other in self._other_conditions(task):
                label = f"{name(task)}, {CONDITIONS.get(other['condition'], other['condition'])}"
                if other["variant"]:
                    label = f"{name(task)}, trained among landmarks"
                if other["length"] != main["length"]:
                    label += f", {_length(other['length'])} tokens"
                rows[label] = {**main, **other}
        return self._table("", "task", rows, _columns_of_models(tested))

    def _other_conditions(self, task: str) -> Iterable[Fields]:
        """In which other conditions the task was measured: the longest of long prompts, else the shortest."""
        main = self.tasks[task]
        alike = _without(main, "condition", "train_condition", "length", "variant", "metric")
        accuracies = self._accuracies(**alike, variant=["", "landmark"])
        is_trained_as_main = (accuracies["variant"] == "") & (
            accuracies["train_condition"] == main["train_condition"]
        )
        is_main_condition = accuracies["condition"] == main["condition"]
        is_other = np.where(
            is_trained_as_main, ~is_main_condition, accuracies["condition"] == "landmark"
        )
        others: dict[tuple[str, str], Fields] = {}
        for fields in _distinct(
            accuracies[is_other], "variant", "condition", "train_condition", "length"
        ):
            key = fields["variant"], fields["condition"]
            if key not in others or fields["condition"] == "long_prompt":
                others[key] = fields
        return others.values()

    def by_length(self, task: str, form: Form = PERCENT) -> Table:
        """Tables 7 to 10, Figure 1: each model by the length of its prompts; the paper's figure below ours."""
        selection = _without(
            self.tasks[task], "metric", "position_embedding", "train_length", "length"
        )
        papers = _papers(PAPER_TABLES["by_length"].get(task)) if form == PERCENT else _papers()
        return self._by(selection, name(task), ["length"], form, below=papers)

    def other_prompts(self, task: str, variant: str = "", form: Form = PERCENT) -> Table:
        """Each model on the other kinds of prompts, by length; of a variant, on all that it was tested on."""
        main = self.tasks[task]
        trained, conditions = self._any("train_condition"), self._any("condition")
        if not variant:
            trained = [main["train_condition"]]
            conditions.remove(main["condition"])
        selection = {
            "task": task,
            "variant": variant,
            "train_condition": trained,
            "condition": conditions,
        }
        return self._by(
            selection, f"{name(task)}, {variant or 'other prompts'}", ["condition", "length"], form
        )

    def _by(
        self, selection: Fields, title: str, keys: list[str], form: Form, **options: Any
    ) -> Table:
        """A row for each model with these fields, a column for each combination of keys that was measured."""
        metric = "token_accuracy" if form == TOKENS_RIGHT else "exact_match"
        selection = {**selection, "metric": metric}
        return self._table(
            title,
            "model",
            models(self.inputs, **selection),
            self._columns(selection, *keys),
            form=form,
            **options,
        )

    def other_recipes(self, task: str) -> Table:
        """Each model with other learning rates, and with more steps, at the train length."""
        columns = {"as above": {"variant": ""}}
        for variant, recipe in RECIPES.items():
            if (variant, task) in self.variants:
                columns[recipe] = {"variant": variant}
        rows = models(self.inputs, **self.tasks[task]) if len(columns) > 1 else {}
        return self._table(name(task), "model", rows, columns)

    def yarn(self, task: str) -> Table:
        """Table 1: exact match by length of models whose window was extended; token accuracy and the paper's below."""
        selection = {"metric": "exact_match", "task": task, "variant": [*WINDOWS]}
        papers = _papers(1, scale=self.inputs.scale)

        def below(fields: Fields) -> list[str]:
            tokens = Cell.of(self.inputs.measured(**{**fields, "metric": "token_accuracy"}))
            lines = [f"tokens {PERCENT(tokens.estimate()[0])}"] if tokens.runs else []
            return lines + papers(fields)

        rows = models(self.inputs, **selection)
        return self._table(
            name(task), "model", rows, self._columns(selection, "length"), below=below
        )

    def ablations(self, task: str, every: bool = False) -> Table:
        """Tables 2 and 11 to 17: what is taken from the meta-tokens, or noise on positions; the paper's below ours.

        At the train length, or at every length.
        """
        interventions = [kind for kind in self._any("intervention") if kind not in ("", ALONE)]
        selection = {"metric": "exact_match", "task": task, "intervention": interventions}
        measured = self.inputs.measured(**selection)
        columns = {
            _intervention(kind): {"intervention": kind}
            for kind in ["", *in_order(measured["intervention"])]
        }
        rows: Selections = {}
        for lengths in _distinct(measured, "train_length", "length"):
            if not every and lengths["length"] != lengths["train_length"]:
                continue
            heading = " \u2192 ".join(map(_length, lengths.values()))
            for model, fields in models(self.inputs, **selection, **lengths).items():
                rows[f"{model}, {heading}"] = fields
        at_train_length = _papers(*PAPER_TABLES["ablations"].get(task, ()))
        by_length = _papers(*PAPER_TABLES["ablations_by_length"].get(task, ()))

        def below(fields: Fields) -> list[str]:
            is_at_train_length = fields["length"] == fields["train_length"]
            return (is_at_train_length and at_train_length(fields)) or by_length(fields)

        return self._table(name(task), "model", rows, columns, below=below)

    def held(self) -> Table:
        """How much is recalled through landmarks alone; with all text in sight, where a model was tested so too."""
        measured = self._accuracies(variant=self._any("variant"), intervention=ALONE)
        rows: Selections = {}
        for fields in _distinct(
            measured, "condition", "task", "variant", "train_condition", "train_length", "length"
        ):
            label = name(fields["task"])
            if fields["condition"] in WORDS["facts"]:
                label = f"{WORDS['facts'][fields['condition']]} per landmark"
            elif fields["condition"] == "landmark":
                label += ", landmarks"
            alone = {**fields, "intervention": ALONE}
            in_sight = {**fields, "intervention": ""}
            if len(self.inputs.measured(**in_sight)):
                label += ", trained with all text in sight"
                rows[f"{label}, tested likewise"] = in_sight
            share_of_cache = self.inputs.measured(**alone)["kv_kept"].mean()
            rows[f"{label}, {PERCENT(share_of_cache)} % of the KV"] = alone
        return self._table("", "", rows, _columns_of_models(measured["model"]))

    def papers(self, table: int) -> Table:
        """All of a table of the paper; our figure of the same setting, where there is one, above the paper's."""
        paper = paper_table(table)
        scale = self.inputs.scale if table == 1 else 1
        rows: Selections = {}
        for row in paper.rows:
            theirs = {"model": "meta", **paper.fields, **row.fields}
            ours = _without(theirs, "metric", "window")
            ours["train_length"] = theirs.get("train_length", LONGEST) // scale
            if table in range(11, 17):
                ours["length"] = ours["train_length"]
            for variant, window in WINDOWS.items():
                if window == theirs.get("window"):
                    ours["variant"] = variant
            rows[_paper_label(theirs)] = ours
        columns: Selections = {}
        for column in paper.columns:
            if "length" in column:
                columns[number(column["length"])] = {**column, "length": column["length"] // scale}
            elif column.get("metric") != "gain":
                columns[_intervention(column["intervention"])] = column
        title = f"Table {table}: {paper.title}"
        ours_and_theirs = self._table(
            title, "model", rows, columns, below=_papers(table, scale=scale), whole=True
        )
        return replace(ours_and_theirs, note=" ".join([ours_and_theirs.note, *paper.notes]))

    # --- How soon, perplexity, and shortcuts

    def sooner(self) -> Table:
        """Training steps until a task is learned: the first measurement from which accuracy stays at 90 % or more."""
        never_learned = Counter(
            run[:3]
            for run, points in learning_curves(self.inputs.curves).items()
            if np.isinf(learned_from(points))
        )

        def below(fields: Fields) -> list[str]:
            runs = never_learned[fields["task"], fields["model"], fields["position_embedding"]]
            return [f"{runs} not learned"] if runs else []

        rows = models(self.inputs, metric="log_steps_to_learn")
        columns = {name(task): {"task": task} for task in self.tasks}
        return self._table("", "model", rows, columns, form=STEPS, below=below)

    def perplexity(self) -> Table:
        """The perplexity of text, with and without meta-tokens inserted."""
        selection = {
            "metric": "perplexity",
            "text": self._any("text"),
            "variant": self._any("variant"),
        }
        columns: Selections = {}
        for fields in _distinct(self.inputs.measured(**selection), "text", "condition"):
            inserted = (
                "alone" if fields["condition"] == "none" else f"meta-tokens {fields['condition']}"
            )
            columns[f"{name(fields['text'])}, {inserted}"] = fields
        return self._table("", "model", models(self.inputs, **selection), columns, form=PERPLEXITY)

    def shortcuts(self) -> Table:
        """The score of each shortcut."""
        selection = {"metric": "shortcut"}
        rows: Selections = {}
        for fields in _distinct(self.inputs.measured(**selection), "task", "condition", "model"):
            label = f"{name(fields['task'])}, {fields['condition']}: {fields['model']}"
            rows[label] = {**selection, **fields}
        form = replace(PERCENT, chance="")
        return make_table(
            self.inputs, "", "shortcut", rows, self._columns(selection, "length"), form=form
        )

    # --- What happens inside; tables.yaml has the rows

    def sharpness(self) -> Table:
        """Figure 2, left and middle: what the meta-tokens' embeddings change."""
        return self._inside("output_entropy_change", ROWS["sharpness"], NATS)

    def premise(self) -> Table:
        """Theorem 4.1: where its premise holds, and whether the entropy fell."""
        return self._inside("output_entropy_change", ROWS["premise"], SHARE)

    def caching(self) -> Table:
        """Figure 2, right: the cosine of a meta-token, and of the text before it, with the tokens before."""
        cosine = {"metric": "similarity_centred", "marker": "context"}
        last_layer = self.inputs.measured(**cosine)["layer"].max()
        rows = {
            label: {**cosine, "layer": last_layer, **fields}
            for label, fields in ROWS["caching"].items()
        }
        return self._inside("similarity_centred", rows, COSINE)

    def attention_of_final(self) -> Table:
        """Figure 3, left: what the final meta-token attends to; below it, what even attention would give."""

        def below(fields: Fields) -> list[str]:
            even = Cell.of(
                self.inputs.measured(**{**fields, "metric": "attention_weight_if_uniform"})
            )
            return [f"evenly {SHARE(even.estimate()[0])}"] if even.runs else []

        return self._inside("attention_weight", ROWS["attention_of_final"], SHARE, below=below)

    def _inside(self, metric: str, rows: Mapping[str, Fields], form: Form, **options: Any) -> Table:
        """A column for each model that has figures of this metric."""
        columns = {
            label: _without(fields, "metric")
            for label, fields in models(self.inputs, metric=metric).items()
        }
        return self._table("", "", rows, columns, form=form, **options)

    def rate_distortion(self) -> Table:
        """Figure 3, right: the distortion at some rates."""
        rows: Selections = {}
        for split, state, model in product(
            WORDS["splits"], WORDS["states"], ("gpt2", "twin", "meta")
        ):
            fields = {"metric": "distortion_at_rate", "model": model, "split": split}
            rows[f"{WORDS['splits'][split]}: {model}, {state}"] = {
                **fields,
                **WORDS["states"][state],
            }
        columns = {f"{rate:g} nats": {"rate": rate} for rate in RATES}
        return self._table("", "scored, model, place", rows, columns, form=DISTORTION)

    # --- What they share

    def _table(self, *arguments: Any, **options: Any) -> Table:
        return make_table(self.inputs, *arguments, by_seed=self.by_seed, **options)

    def _columns(self, selection: Fields, *keys: str) -> Selections:
        """A column for each combination of keys that was measured."""
        return {
            _heading(fields): fields
            for fields in _distinct(self.inputs.measured(**selection), *keys)
        }

    def _accuracies(self, **selection: Any) -> pd.DataFrame:
        """The accuracies in every condition, of models that were trained in any."""
        conditions = {
            "condition": self._any("condition"),
            "train_condition": self._any("train_condition"),
        }
        return self.inputs.measured(**conditions | selection)

    def _any(self, column: str) -> list[str]:
        return sorted(set(self.inputs.figures[column]))


def _columns_of_models(names: Iterable[str]) -> Selections:
    return {model: {"model": model} for model in in_order(names)}


def _main_fields(accuracies: pd.DataFrame) -> Fields:
    """The fields of a task's main figures: trained on the paper's prompts, rotary positions, where there are such."""
    fields = {"metric": "exact_match", "variant": "", "task": accuracies["task"].iloc[0]}
    for column, preferred in (
        ("train_condition", "paper"),
        ("position_embedding", "rope"),
        ("condition", ""),
    ):
        values = in_order(accuracies[column])
        wanted = preferred or fields["train_condition"]
        fields[column] = wanted if wanted in values else values[0]
        accuracies = accuracies[accuracies[column] == fields[column]]
    train_length, lengths = accuracies["train_length"].min(), accuracies["length"]
    length = train_length if (lengths == train_length).any() else lengths.min()
    return {**fields, "train_length": plain(float(train_length)), "length": plain(float(length))}


def _distinct(figures: pd.DataFrame, *keys: str) -> list[dict[str, Any]]:
    """The combinations of values in these columns, each once, in order."""
    rows = plain_rows(figures[[*keys]].drop_duplicates())
    return sorted(rows, key=lambda row: list(map(_order_of_value, row.values())))


def _order_of_value(value: Any) -> tuple[Any, ...]:
    return order(value) if isinstance(value, str) else (value or 0, "")


def _without(fields: Fields, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in keys}


def _heading(column: Fields) -> str:
    """The heading of a column of a length, of a condition, or of both."""
    length = _length(column["length"])
    if "condition" not in column:
        return length
    return f"{CONDITIONS.get(column['condition'], column['condition'])}, {length}"


def _length(value: int | None) -> str:
    return "all lengths" if value is None else number(value)


def _intervention(kind: str) -> str:
    return INTERVENTIONS.get(kind, kind.replace(":", " "))


def papers_ratio(timing: Timing) -> float | None:
    """The paper's ratio of the same times (Table 3): with meta-tokens, in its dense code, over without."""
    compared = (timing.benchmark, timing.model, timing.against)
    if compared == ("decode", "dense, inserting", "gpt2"):
        return paper_table(3).at(metric="slowdown", model="meta")
    if compared == ("prefill", "dense", "gpt2"):
        with_metas, without = (
            paper_table(3).at(metric="first_token_ms", model=model) for model in ("meta", "gpt2")
        )
        return (with_metas or nan) / (without or nan)
    return None


def _papers(*tables: int | None, scale: int = 1) -> Lines:
    """The line below a figure: the paper's figure, from the first of these tables that has it.

    Its prompts are `scale` times as long as ours.
    """

    def below(fields: Fields) -> list[str]:
        setting = {"intervention": "", **_without(fields, "metric")}
        for key in ("train_length", "length"):
            if setting.get(key):
                setting[key] *= scale
        if setting.get("variant") in WINDOWS:
            setting["window"] = WINDOWS[setting["variant"]]
        values = [paper_table(table).at(**setting) for table in tables if table]
        return [f"paper {value:.1f}" for value in values if value is not None][:1]

    return below


def _paper_label(fields: Fields) -> str:
    words = [fields["model"], POSITIONS[fields["position_embedding"]]]
    if "window" in fields:
        words += [name(fields["task"]), f"window {fields['window']:,}"]
    if "train_length" in fields:
        words.append(f"to {fields['train_length']:,}")
    if "length" in fields:
        words.append(f"at {fields['length']:,}")
    return ", ".join(words)
