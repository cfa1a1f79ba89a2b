"""The page of `metatokens look` in a browser: it draws, responds to mouse and keyboard, and nothing overflows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metatokens.checkpoint import load_model
from metatokens.data.tokenizer import load_tokenizer
from metatokens.looking.look import look
from metatokens.looking.page import MAX_SIDE, Look, to_html

PROMPT = "Birds: swan owl _PAUSE_ duck\nColours: red <b>blue</b> _PAUSE_ green\nQ: What is item 3 of Birds? _PAUSE_"


@pytest.fixture(scope="module")
def looks(small_model: Callable[..., Path]) -> list[Look]:
    """Of an untrained `meta` and an untrained `gpt2`."""
    folders = [small_model(second_attention="meta"), small_model(second_attention="none")]
    return [
        look(load_model(folder), load_tokenizer(str(folder)), PROMPT, "_PAUSE_", name=name)
        for folder, name in zip(folders, ("meta", "gpt2"), strict=True)
    ]


@pytest.fixture
def page(browser: Any, looks: list[Look], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page of both models; the test fails if it logs, raises or fetches anything."""
    file = tmp_path / "look.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metatokens.looking.page.MAX_SIDE", getattr(request, "param", MAX_SIDE))
        file.write_text(to_html(looks), encoding="utf-8")
    opened, noted = browser.new_page(viewport={"width": 1280, "height": 900}), []
    opened.on("console", lambda message: noted.append(message.text))
    opened.on("pageerror", lambda error: noted.append(str(error)))
    opened.on("request", lambda request: noted.append(request.url) if request.url != file.as_uri() else None)
    opened.goto(file.as_uri())
    opened.wait_for_selector("body[data-ready]")
    yield opened
    opened.close()
    assert noted == []


def weights(page: Any, plot: int) -> list[list[float]]:
    """The weights in the hover texts of a map."""
    return page.evaluate(
        "i => document.querySelectorAll('.plot')[i].data[0].customdata.map(r => r.map(c => c[2]))", plot
    )


def choose(page: Any, field: str, name: str) -> None:
    page.locator(f"#{field} label", has_text=name).click()


def pressed(page: Any) -> list[str]:
    return page.eval_on_selector_all('.tokens button[aria-pressed="true"]', "all => all.map(one => one.title)")


def test_maps_show_the_chosen_layer_and_head(page: Any, looks: list[Look]) -> None:
    for layer, head in ((1, 0), (0, 1)):
        choose(page, "layers", str(layer))
        choose(page, "heads", str(head))
        for plot, module in enumerate(("attention", "second_attention")):
            expected = looks[0].attention(module, layer)[head].tolist()
            shown = weights(page, plot)
            assert len(shown) == len(expected)
            differences = [abs(a - b) for x, y in zip(shown, expected, strict=True) for a, b in zip(x, y, strict=True)]
            assert max(differences) < 1 / 255
    choose(page, "heads", "mean")
    mean = looks[0].attention("attention", 0).mean(dim=0)
    assert abs(weights(page, 0)[-1][0] - float(mean[-1, 0])) < 1 / 255


def test_hovering_a_map_shows_query_key_and_weight(page: Any) -> None:
    drag = page.locator(".plot").first.locator(".nsewdrag")
    box = drag.bounding_box()
    drag.hover(position={"x": 3, "y": box["height"] - 3})
    told = page.locator(".hoverlayer .hovertext").first
    told.wait_for()
    assert "query" in told.text_content()
    assert "key 0 Birds" in told.text_content().replace("\xa0", " ") or "key 0 B" in told.text_content()
    assert "weight" in told.text_content()


def test_a_click_on_a_map_chooses_its_query(page: Any) -> None:
    drag = page.locator(".plot").first.locator(".nsewdrag")
    box = drag.bounding_box()
    before = pressed(page)
    drag.click(position={"x": box["width"] / 2, "y": 2})
    assert [title.split()[0] for title in pressed(page)] == ["0", "0"]
    assert pressed(page) != before


def test_a_token_is_chosen_by_mouse_and_by_arrow_keys(page: Any, looks: list[Look]) -> None:
    first = page.locator(".tokens").first
    first.locator("button").nth(2).click()
    assert [title.split()[0] for title in pressed(page)] == ["2", "2"]
    told = page.locator(".state").first
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
        reached.add(page.evaluate("document.activeElement.name || document.activeElement.parentElement.className"))
    assert {"layers", "heads", "tokens"} <= reached
    choose(page, "layers", "0")
    page.keyboard.press("ArrowRight")
    assert page.locator("#layers input").nth(1).is_checked()


def test_the_prompt_is_shown_as_text(page: Any) -> None:
    assert page.locator("b", has_text="blue").count() == 0


@pytest.mark.parametrize("width", [375, 1280])
def test_nothing_is_wider_than_the_screen(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    beyond = """width => [...document.querySelectorAll("body *")].filter(one => !one.closest(".scroll, svg")
        && one.checkVisibility() && one.getBoundingClientRect().right > width + 0.5).map(one => one.outerHTML)"""
    assert page.evaluate(beyond, width) == []
    assert page.locator(".plot .main-svg").count() > 0


def test_lightness_alone_distinguishes_weights(page: Any) -> None:
    scale = page.evaluate("document.querySelector('.plot').data[0].colorscale.map(([at, colour]) => colour)")
    lightness = [sum(int(c[i : i + 2], 16) * w for i, w in ((1, 0.2126), (3, 0.7152), (5, 0.0722))) for c in scale]
    assert lightness == sorted(lightness, reverse=True)
    assert lightness[0] - lightness[-1] > 150


@pytest.mark.parametrize("page", [16], indirect=True)
def test_a_map_of_several_tokens_a_cell_says_so_and_names_positions(page: Any, looks: list[Look]) -> None:
    step = -(-len(looks[0].ids) // 16)
    assert f"a cell for {step} tokens" in page.locator("figcaption").first.text_content()
    axis = page.evaluate("document.querySelector('.plot').layout.xaxis")
    assert [int(text) for text in axis["ticktext"]] == [cell * step for cell in axis["tickvals"]]
    assert any(page.eval_on_selector_all(".tokens button", "all => all.map(one => one.style.background)"))
