"""Makes the pictures of docs/tensorboard.md from a real run.

Trains two groups of two workers on the digits, or uses the run that an earlier
call left in the workdir, and takes the pictures with a headless Chromium.
"""

import pathlib
from collections.abc import Callable
from typing import Any

from benchmarks import tensorboard_pages
from launch import local
from tfdistill.system import programs

_IMAGES = pathlib.Path(__file__).resolve().parent.parent / "docs" / "images"
_WIDTH, _HEIGHT = 1500, 900
# What moves after the last curve is there: animations, legends.
_SETTLE_MSECS = 3000
_TAGS = "^codistillation/(task|distillation)_loss|agreement|staleness_steps"


def _train(workdir: str) -> None:
    code = local.main(
        [
            *("--num_groups=2", "--workers_per_group=2", "--recipe=digits"),
            *(f"--workdir={workdir}", "--override=num_steps=2000"),
            "--override=start_together_secs=200",
        ]
    )
    if code:
        raise RuntimeError(f"The run ended with exit code {code}.")


def _time_series(page: Any, board: tensorboard_pages.TensorBoard) -> None:
    page.goto(board.page("timeseries", query=f"smoothing=0&tagFilter={_TAGS}"))
    page.locator(".series-view svg path").first.wait_for(state="attached")
    page.get_by_role("button", name="Settings").last.click()


def _custom_scalars(page: Any, board: tensorboard_pages.TensorBoard) -> None:
    page.goto(board.page("custom_scalars&_smoothingWeight=0"))
    page.locator(".line-plot path").first.wait_for(state="attached")


def _hparams(page: Any, board: tensorboard_pages.TensorBoard) -> None:
    page.goto(board.page("hparams"))
    page.locator("vaadin-grid-cell-content", has_text="group_1").first.wait_for(
        state="attached"
    )


def _text(page: Any, board: tensorboard_pages.TensorBoard) -> None:
    page.goto(board.page("text"))
    news = page.locator("tf-text-loader", has_text="/news").first
    news.wait_for()
    page.locator("tf-text-loader", has_text="/news").last.hover()


_PICTURES: dict[str, Callable[[Any, tensorboard_pages.TensorBoard], None]] = {
    "tensorboard_time_series": _time_series,
    "tensorboard_custom_scalars": _custom_scalars,
    "tensorboard_hparams": _hparams,
    "tensorboard_text": _text,
}


def _add_options(options: programs.Flags) -> None:
    options.add("workdir", "<DIR>: directory of the run", required=True)


def _run(options: programs.Options) -> int:
    browser = tensorboard_pages.find_browser()
    if browser is None:
        raise programs.UsageError("expected a Chromium on PATH; found none")
    _train(options.workdir)
    _IMAGES.mkdir(exist_ok=True)
    with tensorboard_pages.serving(options.workdir) as board:
        for name, show in _PICTURES.items():
            with tensorboard_pages.browser_page(
                browser, width=_WIDTH, height=_HEIGHT
            ) as page:
                show(page, board)
                page.wait_for_timeout(_SETTLE_MSECS)
                page.screenshot(path=_IMAGES / f"{name}.png")
                print(_IMAGES / f"{name}.png")
    return 0


PROGRAM = programs.Program(
    name="python -m benchmarks.tensorboard_screenshots",
    about=__doc__,
    define=_add_options,
    run=_run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
