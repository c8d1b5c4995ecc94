"""The page in a real browser: it opens without a complaint, charts are drawn, and clicks do what they should."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Page, browsing
from made_up import EVALUATION, HOSTILE, layer_names, row, write_run

from scalewright.report.page import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """The page, that must not have complained in the end, nor asked for anything but itself."""
    browser.complaints.clear()
    browser.requests.clear()
    yield browser
    assert browser.complaints == []
    assert {each.split(":")[0] for each in browser.requests} <= {"file", "data"}
    assert len([each for each in browser.requests if each.startswith("file")]) == 1


def written(folder: Path, names: list[str], **given) -> Path:
    chance = random.Random(0)
    return write_report(write_run(folder, [row(name, chance) for name in names]), **given)


def num_drawn(page: Page, chart: str) -> int:
    found = page.run(f"document.querySelectorAll('#{chart} svg.main-svg').length")
    assert isinstance(found, int)
    return found


def first_column(page: Page) -> list[str]:
    return page.texts("#table tbody td:first-child")


def test_charts_are_drawn_in_light_and_dark(page: Page, tmp_path: Path) -> None:
    names = [*layer_names(4), *layer_names(4, num_experts=6)]
    file = written(tmp_path / "out", names, seconds={"load": 1.0, "calibrate": 5.0}, evaluation=EVALUATION)
    page.open(file)
    charts = page.run("[...document.querySelectorAll('.chart')].filter(e => e.checkVisibility()).map(e => e.id)")
    assert charts == [
        *("curve", "heat", "weight-values", "input-values", "ratios", "above", "tokens", "times"),
    ]
    assert {chart: num_drawn(page, chart) > 0 for chart in charts} == dict.fromkeys(charts, True)
    assert page.run("document.querySelector('#heat .heatmaplayer image') !== null")
    assert page.run("document.querySelectorAll('#weight-values .barlayer .point path').length") == 64
    light = page.run("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.run("document.documentElement.dataset.theme") == "dark"
    assert page.run("getComputedStyle(document.body).backgroundColor") != light
    page.run("localStorage.clear()")


def test_the_theme_is_the_systems(page: Page, tmp_path: Path) -> None:
    page.open(written(tmp_path / "out", layer_names(1)), theme="dark")
    assert page.run("document.documentElement.dataset.theme") == "dark"


def test_a_thousand_layers_are_sorted_and_filtered(page: Page, tmp_path: Path) -> None:
    names = [*layer_names(143), "lm_head"]
    chance = random.Random(0)
    rows = [row(name, chance) for name in names]
    rows[5]["output_db"] = None
    page.open(write_report(write_run(tmp_path / "out", rows)))
    assert first_column(page) == names[:100]
    heads = page.texts("#table th")
    column = f"#table th:nth-child({heads.index('output dB') + 1})"
    page.click(f"{column} button")
    known = sorted((each for each in rows if each["output_db"] is not None), key=lambda each: each["output_db"])
    assert first_column(page) == [each["name"] for each in known[:100]]
    assert page.run(f"document.querySelector({column!r}).getAttribute('aria-sort')") == "ascending"
    page.click(f"{column} button")
    assert first_column(page) == [each["name"] for each in reversed(known[-100:])]
    page.click("#more")
    assert first_column(page)[-1] == names[5] and len(first_column(page)) == 1002  # what is not known comes last
    page.click("#table th:first-child button")
    assert first_column(page)[:2] == ["lm_head", "model.layers.0.mlp.down_proj"]
    page.type("#filter", "layers.14. Q_PROJ")
    assert first_column(page) == ["model.layers.14.self_attn.q_proj"]
    assert page.texts("#count")[0].startswith("1 of 1002 layers")


def test_a_layer_can_be_picked_in_the_table_and_among_the_worst(page: Page, tmp_path: Path) -> None:
    names = layer_names(2)
    page.open(written(tmp_path / "out", names))
    picked = "document.getElementById('picked').selectedOptions[0].textContent"
    worst = page.texts("button.layer")
    assert len(worst) == 10 and page.run(picked) == worst[0]
    page.click("#table tbody tr:nth-child(3)")
    assert page.run(picked) == names[2]
    page.click("ol.worst li:nth-child(2) button.layer")
    assert page.run(picked) == worst[1]
    end = "document.getElementById('weight-values').layout.xaxis.range[1]"
    assert page.run(end) < 1.2
    page.click("#whole")
    assert page.run(end) > 1.2  # the largest of all values


def test_names_of_models_do_nothing(page: Page, tmp_path: Path) -> None:
    names = [f"model.layers.{number}.{text}" for number, text in enumerate(HOSTILE)]
    page.open(written(tmp_path / "out", names, seconds={HOSTILE[0]: 1.0}))
    assert first_column(page) == names
    kinds = {name.rpartition(".")[2] for name in names}
    assert set(page.texts("#heat .ytick text")) == kinds
    assert set(page.texts("#above .legendtext")) == kinds
    assert page.run("window.hacked === undefined")
    assert page.run("document.querySelectorAll('main a, main img, main script, svg a').length") == 0


def test_it_fits_a_phone(page: Page, tmp_path: Path) -> None:
    page.open(written(tmp_path / "out", layer_names(12), evaluation=EVALUATION), size=(390, 844))
    assert page.run("document.documentElement.scrollWidth") == 390


def test_figures_are_in_sight_where_formats_differ(page: Page, tmp_path: Path) -> None:
    chance = random.Random(0)
    rows = [row(name, chance) for name in layer_names(2)]
    group = "fp4, groups of 16, under a global scale"
    rows[0] |= {"weights": group, "activations": f"{group}, dynamic group scales"}
    page.open(write_report(write_run(tmp_path / "out", rows)))
    heads = page.texts("#table th")
    assert {"weights", "inputs"} <= set(heads)
    ends = page.run("[...document.querySelectorAll('#table th')].map(each => each.getBoundingClientRect().right)")
    edge = page.run("document.querySelector('.scroll').getBoundingClientRect().right")
    seen = [head for head, end in zip(heads, ends, strict=True) if end <= edge]
    assert {"bits", "output dB", "weight dB", "gain dB", "above best", "tokens"} <= set(seen)


def test_depths_are_whole_numbers(page: Page, tmp_path: Path) -> None:
    page.open(written(tmp_path / "out", layer_names(6)[7:]))
    assert page.texts("#above .xtick text") == ["1", "2", "3", "4", "5"]


def test_a_checkpoint_without_figures_is_a_table(page: Page, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", [{"name": "model.layers.0.up_proj"}], has_pictures=False)
    page.open(write_report(folder))
    assert first_column(page) == ["model.layers.0.up_proj"]
    assert page.run("[...document.querySelectorAll('.chart')].filter(e => e.checkVisibility()).length") == 0
