"""A click log that is made, not downloaded: some days, and the truth known.

A row shows an ad to a user on a site. Its click is drawn with a probability
whose logit is the sum of

- what the ad, the user and the site are worth, from normal distributions;
- the match of ad and user: the product of two vectors of 4 numbers;
- terms of three numbers: the place on the page (1 to 5), the logarithm of the
  price, and the hour, by a sine;
- the day: all clicks drift together, and each ad's worth drifts on its own,
  both as random walks.

A clicked row may lead to a sale. The logit of that is what ad and user are
worth as buyers, from normal distributions, and a term of the price. So a sale
is as rare as both together, about one in four clicks.

Ads, users and sites occur by power laws, and how often an ad occurs drifts,
too: ads of the last day may be rare or new in the days before. A model trains
on the first seven days and is judged on the last, where no model can have less
log loss than the true probabilities.

Made by NumPy in a tenth of a second, the same on every machine for one seed.
Imports neither TensorFlow nor Keras.
"""

import dataclasses
from typing import Any

import numpy as np

from tfdistill import metrics

# How many there are of each id.
NUM_IDS = {"ad": 3000, "user": 5000, "site": 200}
NUMBERS = ("place", "price", "hour")
NUM_DAYS = 8
_MATCH_SIZE = 4
# About a click in six rows.
_BIAS = -1.5
# About a sale in four clicks.
_SALE_BIAS = -1.3

Inputs = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """Rows of a click log, in the order of days.

    Attributes:
        inputs: `ids` int32 `[rows, 3]` of ad, user and site; `numbers` float32
            `[rows, 3]`.
        labels: 0 or 1, float32 `[rows, 1]`.
        probabilities: The true ones of a click, float64 `[rows]`.
        sales: 0 or 1, float32 `[rows, 1]`; 0 in a row without a click.
        sale_probabilities: The true ones of a sale, before it is known whether
            there is a click, float64 `[rows]`.
        days: From 0, int64 `[rows]`.
    """

    inputs: Inputs
    labels: np.ndarray
    probabilities: np.ndarray
    sales: np.ndarray
    sale_probabilities: np.ndarray
    days: np.ndarray

    def where(self, rows: np.ndarray) -> "Log":
        """Returns the rows for which a boolean array `[rows]` is true."""
        return Log(
            inputs={name: x[rows] for name, x in self.inputs.items()},
            labels=self.labels[rows],
            probabilities=self.probabilities[rows],
            sales=self.sales[rows],
            sale_probabilities=self.sale_probabilities[rows],
            days=self.days[rows],
        )


def generate(
    seed: int = 0,
    rows_per_day: int = 8000,
    drift: float = 0.15,
) -> Log:
    """Returns a whole log.

    Args:
        seed: Another one gives another world, not only other rows of it.
        rows_per_day: Number of rows of each day.
        drift: Standard deviation of a day's step of all random walks.
    """
    rng = np.random.default_rng(seed)
    shape = (NUM_DAYS, 1)

    def walk(size: int) -> np.ndarray:
        return drift * rng.normal(size=(NUM_DAYS, size)).cumsum(axis=0)

    days = np.repeat(np.arange(NUM_DAYS), rows_per_day)
    popularity = {
        name: np.tile(-rng.permutation(np.log1p(np.arange(size))), shape)
        for name, size in NUM_IDS.items()
    }
    popularity["ad"] += 3 * walk(NUM_IDS["ad"])
    ids = {
        name: np.concatenate([_draw(rng, day, rows_per_day) for day in logs])
        for name, logs in popularity.items()
    }
    numbers = {
        "place": rng.integers(1, 6, len(days)).astype(np.float64),
        "price": rng.normal(size=len(days)),
        "hour": rng.integers(0, 24, len(days)).astype(np.float64),
    }
    worth = {
        name: scale * rng.normal(size=NUM_IDS[name])
        for name, scale in (("ad", 0.7), ("user", 0.6), ("site", 0.4))
    }
    match = {
        name: rng.normal(size=(NUM_IDS[name], _MATCH_SIZE))
        for name in ("ad", "user")
    }
    products = match["ad"][ids["ad"]] * match["user"][ids["user"]]
    logits = (
        _BIAS
        + walk(1)[days, 0]
        + walk(NUM_IDS["ad"])[days, ids["ad"]]
        + sum(worth[name][ids[name]] for name in NUM_IDS)
        + 0.3 * products.sum(axis=1)
        - 0.3 * (numbers["place"] - 3)
        - 0.2 * numbers["price"] ** 2
        + 0.3 * np.sin(2 * np.pi * numbers["hour"] / 24)
    )
    probabilities = 1 / (1 + np.exp(-logits))
    clicks = rng.random(len(days)) < probabilities
    # Drawn last: the clicks of a seed are the same with and without sales.
    buys = {
        name: 0.7 * rng.normal(size=NUM_IDS[name]) for name in ("ad", "user")
    }
    sale_logits = (
        _SALE_BIAS
        + sum(buys[name][ids[name]] for name in buys)
        - 0.4 * numbers["price"]
    )
    after_click = 1 / (1 + np.exp(-sale_logits))
    sales = clicks & (rng.random(len(days)) < after_click)
    return Log(
        inputs={
            "ids": np.stack([ids[n] for n in NUM_IDS], 1).astype(np.int32),
            # About between -1 and 1.
            "numbers": np.stack(
                [
                    (numbers["place"] - 3) / 2,
                    numbers["price"],
                    numbers["hour"] / 12 - 1,
                ],
                axis=1,
            ).astype(np.float32),
        },
        labels=clicks.astype(np.float32)[:, np.newaxis],
        probabilities=probabilities,
        sales=sales.astype(np.float32)[:, np.newaxis],
        sale_probabilities=probabilities * after_click,
        days=days,
    )


def _draw(rng: Any, popularity: np.ndarray, rows: int) -> np.ndarray:
    shares = np.exp(popularity)
    return rng.choice(len(shares), rows, p=shares / shares.sum())


def split(log: Log) -> tuple[Log, Log]:
    """Returns the days to train on, and the last day."""
    is_last = log.days == NUM_DAYS - 1
    return log.where(~is_last), log.where(is_last)


def truth(log_seed: int = 0, rows_per_day: int = 8000) -> float:
    """Returns the log loss of the true probabilities on the last day."""
    _, held_out = split(generate(log_seed, rows_per_day))
    found = metrics.quality(held_out.labels, held_out.probabilities)
    return found["log_loss"]
