"""One task of groups that learn from each other's predictions."""

import pathlib

import numpy as np

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import mutual_learning


def main() -> None:
    cluster = tfdistill.Cluster.from_env()
    strategy = tfdistill.make_strategy(cluster)
    with strategy.scope():
        model = mutual_learning.model(cluster)
    dataset = tfdistill.data.group_shard(
        mutual_learning.data(), cluster, mode="coordinated"
    )
    model.fit(
        dataset,
        steps_per_epoch=mutual_learning.NUM_STEPS,
        verbose=0,
        callbacks=[cases.never()],
    )
    (teacher,) = model.teachers.status()
    name = f"group_{cluster.group}_{cluster.task_index}.npz"
    np.savez(
        pathlib.Path(cluster.workdir, name),
        *model.get_weights(),
        num_missed=teacher["num_missed"],
    )


if __name__ == "__main__":
    main()
