"""The dashboards of a real run, in a real TensorBoard and a real browser."""

import pytest

from benchmarks import tensorboard_pages
from launch import local

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout_secs(600),
    pytest.mark.usefixtures("no_process_left"),
]
_RUNS = ["group_0/tensorboard", "group_1/tensorboard"]
_NUM_STEPS = 250
# Curves of both groups. A chart without points has a path without commands.
_CURVES_OF = {
    "timeseries": ".series-view svg path[d*='L']",
    "custom_scalars": ".line-plot:not(.ghost) path[d*='L']",
}


@pytest.fixture
def browser():
    found = tensorboard_pages.find_browser()
    if found is None:
        pytest.skip("needs a browser: no chromium on PATH (apt-get install)")
    return found


@pytest.fixture
def run(tmp_path):
    """Two groups that have learnt from each other."""
    pytest.importorskip("sklearn", reason="needs the digits (extra: models)")
    changes = (
        f"num_steps={_NUM_STEPS}",
        # TensorBoard leaves the largest and the smallest value out of a chart's
        # range, and a curve with no point inside the range is not drawn. A
        # curve of three points or more always has one inside.
        "evaluate_every_steps=50",
        "codistillation.burn_in_steps=0",
        "exchange.every_steps=20",
        "exchange.refresh_every_steps=1",
        "exchange.poll_secs=0.05",
        "start_together_secs=200",
    )
    options = [f"--override={change}" for change in changes]
    code = local.main(
        [
            *("--num_groups=2", "--workers_per_group=1", "--recipe=digits"),
            f"--workdir={tmp_path / 'run'}",
            *options,
        ]
    )
    assert code == 0
    return tmp_path / "run"


def test_the_dashboards_show_both_groups(run, browser):
    with (
        tensorboard_pages.serving(str(run)) as board,
        tensorboard_pages.browser_page(
            browser, width=1400, height=1000
        ) as page,
    ):
        _check_data(board)
        _check_time_series(page, board)
        _check_custom_scalars(page, board)
        _check_text(page, board)
        _check_hparams(page, board)


def _check_data(board):
    assert sorted(board.data("data/runs")) == _RUNS
    shown = board.data("data/plugins_listing")
    for name in ("timeseries", "custom_scalars", "text", "hparams"):
        assert shown[name]["enabled"], name
    for name in _RUNS:
        points = board.data(
            "data/plugin/scalars/scalars"
            f"?tag=codistillation/task_loss&run={name}"
        )
        steps = [step for _, step, _ in points]
        assert steps == list(range(50, _NUM_STEPS + 1, 50))
        found = board.data(
            "data/plugin/custom_scalars/scalars"
            f"?tag=^teachers/[^/]%2B/staleness_steps$&run={name}"
        )
        assert found["regex_valid"] and len(found["tag_to_events"]) == 1


def _check_time_series(page, board):
    page.goto(board.page("timeseries", query="tagFilter=task_loss"))
    card = page.locator("scalar-card")
    card.first.wait_for()
    title = "".join(card.first.inner_text().split())
    assert title.startswith("codistillation/task_loss")
    curves = card.first.locator(_CURVES_OF["timeseries"])
    curves.nth(1).wait_for(state="attached")
    for name in _RUNS:
        card.first.get_by_text(name).first.wait_for()


def _check_custom_scalars(page, board):
    page.goto("about:blank")
    page.goto(board.page("custom_scalars"))
    page.get_by_text("Does it pay?").first.wait_for()
    for title in ("Task loss", "Distillation loss", "Validation loss"):
        chart = page.locator(
            "tf-custom-scalar-multi-line-chart-card", has_text=title
        ).first
        chart.locator(_CURVES_OF["custom_scalars"]).nth(1).wait_for(
            state="attached"
        )
    for title in ("Teachers", "Exchange", "Host"):
        assert page.get_by_text(title, exact=True).count()


def _check_text(page, board):
    page.goto("about:blank")
    page.goto(board.page("text"))
    loaders = page.locator("tf-text-loader", has_text="run/configuration")
    for index in range(2):
        text = loaders.nth(index).locator("#markdown pre").first
        text.wait_for()
        assert f'"num_steps": {_NUM_STEPS}' in text.inner_text()
    assert page.get_by_text("is good").count()


def _check_hparams(page, board):
    page.goto("about:blank")
    page.goto(board.page("hparams"))
    for group in ("group_0", "group_1"):
        cell = page.locator("vaadin-grid-cell-content", has_text=group).first
        cell.wait_for(state="attached")
    assert page.get_by_text("optimizer.learning_rate").count()
    assert page.get_by_text("validation/accuracy").count()
