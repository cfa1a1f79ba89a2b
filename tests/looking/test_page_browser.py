"""The page of `metatokens look` in a browser: it draws, responds to mouse and keyboard, and nothing overflows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from metatokens.checkpoint import load_model
from metatokens.data.tokenizer import load_tokenizer
from metatokens.looking.look import look
from metatokens.looking.page import MAX_SIDE, Look, to_html

PROMPT = "Birds: swan owl _PAUSE_ duck\nColours: red <b>blue</b> _PAUSE_ green\nQ: What is item 3 of Birds? _PAUSE_"


@pytest.fixture(scope="module")
def looks(small_model: Callable[..., Path]) -> list[Look]:
    """Of an untrained `meta` and an untrained `gpt2` with fewer layers."""
    folders = {
        "meta": small_model(second_attention="meta"),
        "gpt2": small_model(second_attention="none", num_hidden_layers=1),
    }
    return [
        look(load_model(folder), load_tokenizer(str(folder)), PROMPT, "_PAUSE_", name=name)
        for name, folder in folders.items()
    ]


@pytest.fixture
def page(
    browser: Any, looks: list[Look], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """The page of both models; the test fails if it logs, raises or fetches anything."""
    file = tmp_path / "look.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metatokens.looking.page.MAX_SIDE", getattr(request, "param", MAX_SIDE))
        file.write_text(to_html(looks), encoding="utf-8")
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    noted: list[str] = []
    opened.on("console", lambda message: noted.append(message.text))
    opened.on("pageerror", lambda error: noted.append(str(error)))
    opened.on("request", lambda request: noted.append(request.url))
    opened.goto(file.as_uri())
    opened.wait_for_selector("body[data-ready]")
    yield opened
    opened.close()
    fetched = [
        note for note in noted if note != file.as_uri() and not note.startswith(("blob:", "data:"))
    ]
    assert fetched == []


def weights(page: Any, plot: int) -> torch.Tensor:
    """The weights in the hover texts of a map."""
    shown = (
        "i => document.querySelectorAll('.plot')[i].data[0].customdata.map(r => r.map(c => c[2]))"
    )
    return torch.tensor(page.evaluate(shown, plot))


def choose(page: Any, field: str, name: str) -> None:
    page.locator(f"#{field} label", has_text=name).click()


def pressed(page: Any) -> list[str]:
    """The positions of the chosen tokens."""
    script = 'all => all.map(button => button.title.split(" ")[0])'
    return page.eval_on_selector_all('.tokens button[aria-pressed="true"]', script)


def first_map(page: Any) -> tuple[Any, dict[str, float]]:
    """The first map, and its place on the page."""
    drag = page.locator(".plot").first.locator(".nsewdrag")
    return drag, drag.bounding_box()


@pytest.mark.parametrize(("layer", "head"), [(1, 0), (0, 1)])
def test_maps_show_the_chosen_layer_and_head(
    layer: int, head: int, page: Any, looks: list[Look]
) -> None:
    choose(page, "layers", str(layer))
    choose(page, "heads", str(head))
    for plot, module in enumerate(("attention", "second_attention")):
        expected = looks[0].attention(module, layer)[head]
        assert (weights(page, plot) - expected).abs().max() < 1 / 255


def test_a_click_on_a_map_chooses_its_query(page: Any) -> None:
    drag, box = first_map(page)
    assert pressed(page) != ["0", "0"]
    drag.click(position={"x": box["width"] / 2, "y": 2})
    assert pressed(page) == ["0", "0"]


def test_a_figure_is_saved(page: Any) -> None:
    drag, _ = first_map(page)
    drag.hover()
    with page.expect_download() as download:
        page.locator(".modebar-btn").first.click()
    assert Path(download.value.path()).read_text().startswith("<svg")


def test_a_token_is_chosen_by_mouse_and_by_arrow_keys(page: Any, looks: list[Look]) -> None:
    told = page.locator(".state").first
    page.locator(".tokens").first.locator("button").nth(2).click()
    assert pressed(page) == ["2", "2"]
    assert "Position 2" in told.text_content()
    assert f"{looks[0].lens.probabilities[-1, 2, 0]:.3f}" in told.text_content()
    page.keyboard.press("ArrowRight")
    assert "Position 3" in told.text_content()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert "Position 1" in told.text_content()


def test_the_keyboard_reaches_everything(page: Any) -> None:
    reached = set()
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.name || document.activeElement.parentElement.className"
            )
        )
    choose(page, "layers", "0")
    page.keyboard.press("ArrowRight")
    assert {"layers", "heads", "tokens"} <= reached
    assert page.locator("#layers input").nth(1).is_checked()


def test_the_prompt_is_shown_as_text(page: Any) -> None:
    assert page.locator("b", has_text="blue").count() == 0


@pytest.mark.parametrize("width", [375, 1280])
def test_nothing_is_wider_than_the_screen(page: Any, width: int) -> None:
    beyond = """width => [...document.querySelectorAll("body *")].filter(node => !node.closest(".scroll, svg")
        && node.checkVisibility() && node.getBoundingClientRect().right > width + 0.5).map(node => node.outerHTML)"""
    page.set_viewport_size({"width": width, "height": 800})
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(beyond, width) == []
    assert page.locator(".plot .main-svg").count() > 0


@pytest.mark.parametrize("page", [16], indirect=True)
def test_a_map_of_several_tokens_a_cell_says_so_and_names_positions(
    page: Any, looks: list[Look]
) -> None:
    step = -(-len(looks[0].ids) // 16)
    axis = page.evaluate("document.querySelector('.plot').layout.xaxis")
    named = [int(text) for text in axis["ticktext"]]
    shades = page.eval_on_selector_all(
        ".tokens button", "all => all.map(button => button.style.background)"
    )
    assert f"a cell for {step} tokens" in page.locator("figcaption").first.text_content()
    firsts = [cell * step for cell in axis["tickvals"]]
    assert named == firsts
    assert set(shades) != {""}
