"""The report on a grid, section by section: the paper's tables and figures, then what it has no control for."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

from matplotlib.figure import Figure

from metatokens.report import (
    ablation_tables,
    comparison,
    control_tables,
    figures,
    findings,
    grid_figures,
    inner_claims,
    inner_figures,
    inner_tables,
    measured,
    recall_claims,
    tables,
)  # fmt: skip
from metatokens.report.cells import POSITIONS
from metatokens.report.grid import LONGER, Grid
from metatokens.report.learning import BUDGET, LEARNED_LOSS
from metatokens.report.overview import MARKS, Claims
from metatokens.report.paper import paper_figure
from metatokens.report.recall_claims import TASKS, TRAINED
from metatokens.report.sections import Block, Fold, Section, examples, majority, picture
from metatokens.report.verdicts import Claim
from metatokens.report.wording import name, tokens


def sections(grid: Grid, found: Claims) -> list[Section]:
    """A section for each group of the paper's tables and figures, and for each control."""
    by_section: dict[str, list[Claim]] = {}
    for claim in (claim for group in found.groups.values() for claim in group):
        by_section.setdefault(claim.section, []).append(claim)

    def section(anchor: str, title: str, intro: str, *blocks: Block | list[Any]) -> Section:
        """What came out first, then what it rests on; the comparisons of every claim are folded in at the end."""
        own = by_section.get(anchor, [])
        said = [
            f"{MARKS[one.verdict]} {one.verdict.capitalize()}{one.so_far()}: {one.text} ({one.tally()})." for one in own
        ]
        shown: list[Block] = []
        for block in blocks:
            if block:
                shown += block if isinstance(block, list) else [block]
        folded = [Fold("Every comparison behind these verdicts", measured.evidence(own))] if own else []
        return Section(anchor, title, intro, [*said, *shown, *folded])

    def drawn(file: str, alt: str, draw: Callable[[Grid, float], Figure], is_there: bool) -> list[Block]:
        return [picture(file, alt, lambda width: draw(grid, width))] if is_there else []

    sharp, residual, distortion = (
        bool(grid.measured(analysis, metric, model="meta"))
        for analysis, metric in (
            ("sharpness", "premise_holds"), ("residual", "similarity_centred"), ("rate_distortion", "rate")
        )
    )  # fmt: skip
    figure1, figure2, figure3 = (paper_figure(number) for number in (1, 2, 3))
    longer = comparison.longer(grid)
    return [
        section(
            "lengths",
            "Accuracy by length (Tables 7\u201310, Figure 1)",
            f"The paper says that {figure1.statement} {figure1.notes[0]} "
            "Length L stands for prompts of more than L/2 and up to L tokens. "
            "Intervals are 95\u00a0%, those of seeds averaged; below them the paper's number and each seed's. In the "
            "figure the band covers the intervals of all seeds, and the paper's GPT-Neo, which has no train length, "
            f"stands in each panel of learned positions. {comparison.neo(grid)} {longer}".strip(),
            drawn("lengths", f"Accuracy by length. {recall_claims.row(grid)}", grid_figures.lengths, True),
            comparison.unlearned(grid),
            [comparison.lengths(grid, task) for task in TASKS],
            *(
                Fold(
                    f"{name(task)}: every model, {unit}",
                    [
                        table
                        for note in ("", LONGER)
                        if (table := comparison.all_lengths(grid, task, note=note, metric=metric)).rows or not note
                    ],
                )
                for task, (metric, unit) in product(
                    TASKS, {"exact_match": "answers", "token_accuracy": "tokens of answers"}.items()
                )
            ),
        ),
        section(
            "training",
            "Was every model trained long enough?",
            f"Loss in fine-tuning at up to {TRAINED[0]} tokens, in nats a token of the answer. A task is learned from "
            f"the first logged step from which it stays under {LEARNED_LOSS}. Where no model has learned a task, "
            f"or one had less than {BUDGET} times the steps of the slowest that learns it, a difference may be one of "
            f"time, and a longer run may turn the verdict that rests on it. {longer}".strip(),
            *(_trained(grid, position, title) for position, title in POSITIONS.items()),
        ),
        section(
            "controls",
            "Parameters or mask? The models one by one",
            "pause adds the meta-tokens to gpt2, twin a second causal attention to pause, and meta limits that "
            "attention to the meta-tokens. twin and meta have the same parameters. Comparisons are of the seeds that "
            "both sides have.",
            control_tables.controls(grid),
        ),
        section(
            "markers",
            "Do the markers give the answer away?",
            "In condition \u201cpaper\u201d a meta-token marks the place that the question asks about. In "
            "\u201cnone\u201d each marker of the context is the ordinary text \u201c|\u201d, at the same place, "
            "which these models never saw as a marker: what is lost is the meta-token, not the place. In "
            "\u201cdecoy\u201d further meta-tokens stand where they leave the answer unchanged. Models trained with "
            "\u201c|\u201d are compared too.",
            control_tables.markers(grid),
            *(
                Fold(f"{name(task)} in condition {condition}", [table])
                for task, condition in product(TASKS, ("none", "decoy"))
                if (table := comparison.all_lengths(grid, task, condition)).rows
            ),
            *(
                Fold(f"List recall of models trained without markers, tested in condition {condition}", [table])
                for condition in ("none", "paper", "decoy")
                if (table := comparison.all_lengths(grid, "list_recall", condition, note="unmarked")).rows
            ),
        ),
        section(
            "learning",
            "How much data until recall (section 4.3)",
            "Accuracy on a fixed set of test prompts while list recall is learned at up to 128 tokens. With three "
            "seeds on each side, all of one before all of the other is one chance in twenty each way. "
            f"{longer}".strip(),
            drawn("learning", "List recall by text tokens seen.", grid_figures.learning, bool(grid.recall())),
            measured.learning(grid),
        ),
        section(
            "yarn",
            "Longer windows with YaRN (Table 1)",
            f"{'At a quarter of the lengths in the paper. ' if grid.scale > 1 else ''}Pretrained on blocks of "
            f"{tokens(1024 // grid.scale)} tokens, extended to windows four and eight times as long, and fine-tuned to "
            "half of the window or all of it. Of meta alone: whether gpt2 does as well was not run. "
            f"{comparison.unlearned_yarn(grid)}".strip(),
            [comparison.yarn(grid, task) for task in ("list_recall", "segment_counting")],
            Fold("The paper's table in full", [comparison.papers_yarn()]),
        ),
        section(
            "ablations",
            "Without position, without embedding (Tables 2, 11\u201314, 17)",
            "At inference, at the meta-tokens alone. Learned positions: p_t = 0; rope, where the paper defines "
            f"nothing: query and key are not rotated. {longer}".strip(),
            ablation_tables.whose_loss(grid),
            ablation_tables.by_length(grid, "list_recall", TRAINED[-1]),
            ablation_tables.zeroed_positions(grid),
            [ablation_tables.ablations(grid, task) for task in TASKS],
            Fold(
                "Every model, task and train length, by length",
                [
                    table
                    for task, trained in product(TASKS, TRAINED[::-1])
                    if (task, trained) != ("list_recall", TRAINED[-1])
                    and (table := ablation_tables.by_length(grid, task, trained)).rows
                ],
            ),
        ),
        section(
            "noise",
            "Noise on the positions (Tables 15, 16)",
            "In Table 15 rope bears noise of 1 and 2 better than learned positions. There is no verdict on that: S is "
            "in units of the learned table for the one, and in positions or radians for the other, so the same S is "
            "not the same disturbance, in the paper no more than here. Both kinds stand side by side instead; what "
            f"the noise is, under each table. {longer}".strip(),
            [ablation_tables.noise(grid, task, 128) for task in ("list_recall", "copying")],
            Fold(
                "At other lengths, at the meta-tokens alone, in raw units",
                [
                    table
                    for task, length, kind in product(
                        ("list_recall", "copying"), (128, 512), ablation_tables.NOISE_KINDS
                    )
                    if (length, kind) != (128, "") and (table := ablation_tables.noise(grid, task, length, kind)).rows
                ],
            ),
        ),
        section(
            "sharpness",
            "Sharper attention (Figure 2, Theorem 4.1)",
            f"The paper says that {figure2.statement} "
            "As printed, Theorem 4.1 is false: with logits (5, 0), adding 1 to the second raises the entropy from "
            "0.040 to 0.090. A boost lowers it where \u03b1 > exp(\u2212H). Compared are a pass with the meta-tokens' "
            "embeddings and one with zeros in their place; pause and twin, without meta-attention, are the control. "
            "The figure shows meta, its seeds side by side in order; the second attention is the one among meta-tokens "
            "alone. Output logits: at the meta-tokens within the prompt, and at its end, where the answer is read. "
            f"{longer}".strip(),
            drawn("sharpness", "Changes of logits and entropy by head.", inner_figures.sharpness, sharp),
            inner_tables.sharpness(grid),
            Fold("Theorem 4.1's premise by layer and head", [inner_tables.premise(grid)]),
            Fold("How the changes of the output are spread", [inner_tables.output_changes(grid)]),
        ),
        section(
            "caching",
            "Cached context (Figures 2, right, and 3, left)",
            "Beside each meta-token stands a control, the text token before it, compared with the tokens before "
            "itself. Centred states: the prompt's mean taken off, since all states of a layer share directions. Up to "
            "16 tokens away each distance stands alone; 32 is 17 to 32, and so on. Bands: 95\u00a0% over prompts; thin "
            f"lines: the seeds, where there are several. {longer}".strip(),
            drawn("similarity", "Cosine by distance.", inner_figures.similarity, residual),
            drawn(
                "heat_map",
                "Similarity of each state of one prompt of list recall to the final meta-token's, meta.",
                inner_figures.heat_map,
                residual,
            ),
            inner_tables.caching(grid),
            inner_tables.attention_of_final(grid),
        ),
        section(
            "rate-distortion",
            "Rate and distortion (Figure 3, right; Theorem 5.1)",
            f"In the paper {figure3.notes[0]} Here it is fitted on 2,000 prompts and scored on 500 held out; as in the "
            "paper beside it. Rates beyond a curve's last point keep that point's distortion. In the figure, no pos: "
            "without position at the meta-tokens; text: at the text token before the last meta-token. Thin lines: the "
            "seeds, where there are several, each the mean of its fits.",
            drawn("rate_distortion", "Distortion by rate.", inner_figures.rate_distortion, distortion),
            [
                "Every model answers at the last meta-token, gpt2 too, which saw none in pretraining: that the "
                "distortion is lower there than at the text before tells where the answer is read. By how much it is "
                f"lower {gaps}."
            ]
            if (gaps := inner_claims.text_gaps(grid))
            else [],
            inner_tables.rate_distortion(grid),
        ),
        section(
            "speed",
            "Inference cost (Table 3)",
            "At the paper's size, side by side in one run. Gathered: the meta-tokens' rows alone pass the second "
            "attention; dense: all rows, masked, as the paper did it, whose numbers stand beside that. One exception "
            "refutes an \u201cat most\u201d. Decoding is timed per text token, the first token after as many "
            "positions: the paper does not say what its prompts hold.",
            measured.speed(grid),
        ),
        section(
            "perplexity",
            "Perplexity, at equal text and at equal compute",
            "Not in the paper. gpt2's plain run reads as many text tokens as meta's; \u201cequal-compute\u201d has as "
            "much compute instead. The interval of a difference is of the luck of training, from the spread of the "
            "models that have several seeds; those in the table are of the text, over its blocks.",
            measured.perplexity(grid),
        ),
        section(
            "placement",
            "Where meta-tokens are put, and how many",
            f"Not in the paper, which places a tenth uniformly at random. {control_tables.text_read(grid)}".strip(),
            control_tables.seed_spread(grid),
            control_tables.placement(grid),
        ),
        section(
            "random-positions",
            "Longer inputs with random positions",
            "Not in the paper: the positions of a training sequence are a sorted random sample of 0 to 2,303 "
            "(Ruoss et al., 2023); at test they are 0, 1, 2 and so on, denser than almost any such sample. Random "
            "ranges: each sequence draws from 0 to a limit of its own, log-uniform between its length and 2,304, in "
            "fine-tuning alone. Both are compared with plain positions trained for as many steps at 128 tokens alone "
            "(list recall). The models of the other sections, which stand below them, have had fewer steps at 128, the "
            "first of their three phases. In the figure, meta with plain positions has as many steps as the others in "
            "list recall, and fewer in the other tasks.",
            drawn(
                "random_positions",
                "Accuracy by length with random positions.",
                grid_figures.random_positions,
                bool(grid.values("model", note="random-positions")),
            ),
            [control_tables.random_positions(grid, task) for task in TASKS],
        ),
        majority(grid.inputs),
        examples(grid.inputs),
    ]


def _trained(grid: Grid, position: str, title: str) -> list[Block]:
    """How the losses of models with these positions fell, and whether each had time enough."""
    curves = grid.losses(position, TRAINED[0])
    if not curves:
        return []
    ours = {model: style for model, style in grid_figures.STYLES.items() if any(one.model == model for one in curves)}
    table = tables.learning_steps(curves)
    return [
        f"{title.capitalize()}. {findings.budget(curves)}",
        picture(
            f"training_{position}", f"Loss by step, {title}.", lambda width: figures.fine_tuning(curves, ours, width)
        ),
        replace(table, title=f"{table.title}, {title}"),
    ]
