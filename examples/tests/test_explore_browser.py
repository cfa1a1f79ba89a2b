"""The page of `examples/explore` in a real browser, and the code behind it."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from examples.explore.app import GAP, META, Explorer, build, serve
from metatokens.checkpoint import EXAMPLE, load_model
from metatokens.data.prompts import encode_prompt
from metatokens.data.tokenizer import load_tokenizer
from metatokens.errors import UserError
from metatokens.looking.look import COVERED, WITH, look

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PROMPT = "Birds: swan owl _PAUSE_ duck\nQ: What is item 3 of Birds? _PAUSE_"


@pytest.fixture(scope="module", autouse=True)
def loops() -> Iterator[None]:
    """Close the event loops that Gradio opens for each page and never closes."""
    opened: list[asyncio.AbstractEventLoop] = []
    new = asyncio.new_event_loop

    def noted() -> asyncio.AbstractEventLoop:
        opened.append(new())
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", noted)
        yield
    asyncio.set_event_loop(None)
    for loop in opened:
        loop.close()


@pytest.fixture(scope="module")
def folders(small_model: Callable[..., Path]) -> list[Path]:
    return [small_model(second_attention="meta"), small_model(second_attention="none")]


def test_answers_are_those_of_look(folders: list[Path]) -> None:
    for title, is_covered in ((WITH, False), (COVERED, True)):
        answers = Explorer(folders).ask(PROMPT, is_covered=is_covered)
        assert list(answers) == [str(folder) for folder in folders]
        for folder in folders:
            expected = look(
                load_model(folder), load_tokenizer(str(folder)), PROMPT, "_PAUSE_"
            ).answers[title]
            told = list(answers[str(folder)].probabilities.values())
            assert all(
                abs(a - b) < 1e-6
                for a, b in zip(told, expected.probabilities.tolist(), strict=True)
            )


def test_a_click_between_tokens_sets_a_meta_token_and_one_on_it_takes_it_away(
    folders: list[Path],
) -> None:
    explorer = Explorer(folders[:1])
    tokenizer = explorer.tokenizer
    ids = encode_prompt(tokenizer, PROMPT, "_PAUSE_")
    for index, (shown, label) in enumerate(explorer.spans(PROMPT)):
        changed = encode_prompt(tokenizer, explorer.toggled(PROMPT, index), "_PAUSE_")
        if label is None:
            assert changed == ids
            continue
        more = 1 if shown == GAP else -1
        assert len(changed) == len(ids) + more
        assert [token for token in changed if token in set(ids)].count(ids[-1]) == ids.count(
            ids[-1]
        ) + more
        back = explorer.spans(explorer.toggled(PROMPT, index))
        assert sum(shown == META for shown, _ in back) == 2 + more
    assert sum(shown == META for shown, _ in explorer.spans(PROMPT)) == 2


def test_what_is_too_long_or_empty_is_refused(folders: list[Path]) -> None:
    explorer = Explorer(folders)
    with pytest.raises(UserError, match=r"the prompt has [\d,]+ tokens; at most 512 can be shown"):
        explorer.ask("owl " * 600)
    with pytest.raises(UserError, match="no text"):
        explorer.ask(" _PAUSE_")
    with pytest.raises(UserError, match="do not show where its question begins"):
        explorer.ask("Birds: swan _PAUSE_ owl", is_covered=True)


def test_users_at_once_get_their_own_answers(folders: list[Path]) -> None:
    explorer = Explorer(folders)
    prompts = [f"{PROMPT} {word}" for word in ("a", "b", "c", "d")]
    alone = [explorer.ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(explorer.ask, prompts * 10))
    for number, answers in enumerate(together):
        for name, answer in answers.items():
            assert answer.probabilities == alone[number % 4][name].probabilities


def test_the_script_serves_the_bundled_model_by_default() -> None:
    script = Path(__file__).parents[1] / "explore/app.py"
    with subprocess.Popen(
        [sys.executable, str(script)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("page: http://127.0.0.1:")
        process.terminate()
    prompt = "Birds: owl robin crow\nMetals: iron zinc copper\nBirds: owl robin _PAUSE_ crow\n"
    (answer,) = Explorer([EXAMPLE]).ask(f"{prompt}Q: What is item 2 of Birds? _PAUSE_").values()
    assert next(iter(answer.probabilities)) == " robin"


@pytest.fixture(scope="module")
def page(folders: list[Path], browser: Any) -> Iterator[Any]:
    """The served page, opened; an error or a request to another server fails the test."""
    served, noted = build(folders), []
    address = serve(served)
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.on("pageerror", lambda error: noted.append(str(error)))
    opened.on("request", lambda request: noted.append(request.url))
    opened.goto(address)
    opened.wait_for_selector(".js-plotly-plot")
    yield opened
    opened.close()
    served.close()
    assert [url for url in noted if not url.startswith((address, "data:", "blob:"))] == []


def answer(page: Any) -> str:
    return page.locator("#answer-0").inner_text()


def ask(page: Any, text: str) -> None:
    page.locator("#prompt textarea").fill(text)
    page.locator("#ask").click()


def test_a_meta_token_that_is_set_by_a_click_changes_the_answer(
    page: Any, folders: list[Path]
) -> None:
    ask(page, "Birds: swan owl duck")
    tokens = page.locator("#tokens .token")
    page.locator("#tokens .token", has_text=META).first.wait_for(state="detached")
    before = answer(page)
    tokens.nth(3).click()
    page.locator("#tokens .token", has_text=META).first.wait_for()
    text = page.locator("#prompt textarea").input_value()
    assert text.count("_PAUSE_") == 1
    assert text.replace(" _PAUSE_", "") == "Birds: swan owl duck"
    page.wait_for_function(
        "before => document.querySelector('#answer-0').innerText !== before", arg=before
    )
    (expected,) = list(Explorer(folders[:1]).ask(text).values())
    assert next(iter(expected.probabilities)).strip() in answer(page)


def test_another_head_is_drawn(page: Any) -> None:
    ask(page, PROMPT)
    first = "JSON.stringify(document.querySelector('.js-plotly-plot').data[0].z)"
    page.wait_for_function("document.querySelector('#tokens').innerText.includes('◆')")
    before = page.evaluate(first)
    page.locator("#head label", has_text="1").click()
    page.wait_for_function(f"before => {first} !== before", arg=before)


def test_what_is_typed_is_text(page: Any) -> None:
    ask(page, "<img src=x onerror=alert(1)> <b>owl</b>")
    page.wait_for_function("document.querySelector('#tokens').innerText.includes('<')")
    assert page.locator("#tokens b, #tokens img").count() == 0


def test_a_mistake_is_one_sentence(page: Any) -> None:
    ask(page, "owl " * 600)
    page.get_by_text("at most 512 can be shown").first.wait_for()


@pytest.mark.parametrize("width", [375, 1280])
def test_nothing_is_wider_than_the_screen(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_function(f"document.documentElement.scrollWidth <= {width}")


def test_an_example_brings_its_answer(page: Any) -> None:
    ask(page, "owl")
    page.locator("#another").click()
    page.wait_for_function(
        "document.querySelector('#prompt textarea').value.includes('Q: What is item')"
    )
    page.wait_for_function("document.querySelector('#tokens').innerText.includes('item')")
    right = page.locator("#right textarea, #right input").input_value()
    assert right in page.locator("#prompt textarea").input_value().split()


def test_what_is_typed_has_no_right_answer_and_old_results_say_so(page: Any) -> None:
    page.locator("#another").click()
    page.wait_for_function("document.querySelector('#right textarea, #right input').value !== ''")
    page.wait_for_function("document.querySelector('#tokens').innerText.includes('item')")
    page.locator("#prompt textarea").press_sequentially(" owl")
    page.wait_for_function("document.querySelector('#right textarea, #right input').value === ''")
    page.get_by_text("The prompt has changed").wait_for()
    page.locator("#ask").click()
    page.get_by_text("The prompt has changed").wait_for(state="detached")


def test_no_prompt_is_kept_in_the_browser(page: Any, folders: list[Path]) -> None:
    text = "owl owl owl owl"
    ask(page, text)
    spans = len(Explorer(folders[:1]).spans(text))
    page.wait_for_function(
        "count => document.querySelectorAll('#tokens .token').length === count", arg=spans
    )
    page.wait_for_timeout(500)
    assert not any(text in value for value in page.evaluate("Object.values(localStorage)"))
