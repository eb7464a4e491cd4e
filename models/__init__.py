"""Workloads: builders and input pipelines, free of any launching.

A module for some data has three functions:

`make_datasets(cluster, *, batch_size, data, seed, **arguments)` returns
a group's training data, endless shuffled batches of the full size, and the
validation data in order, whose last batch may be partial. Both are the same on
every worker of a group; `fit` gives each worker its rows of every batch.

- `cluster` says which group this is.
- `batch_size`: examples per step of the whole group.
- `data`: `"disjoint"` (default): the groups share out the training examples;
  `"shared"`: all groups get all of them, each in its own order.
- `seed` chooses the order of the training examples, together with the group.
  Default 0.

`make_schema(**arguments)` returns what inputs and outputs mean, to compare
between groups. It takes the same arguments; most of them change nothing.

`build_model` returns a student without teachers.
"""

# By the name of the recipe: its module, and the function in it.
RECIPES = {
    "cifar10": "models.cifar10:workload",
    "cifar10_small": "models.cifar10:small",
    "clicks": "models.clicks:workload",
    "clicks_dcn": "models.clicks:dcn",
    "clicks_two_tasks": "models.clicks:two_tasks",
    "criteo": "models.criteo:workload",
    "criteo_dcn": "models.criteo:dcn",
    "criteo_dlrm": "models.criteo:dlrm",
    "criteo_small": "models.criteo:small",
    "digits": "models.digits:workload",
    "imagenet": "models.imagenet:workload",
    "language_model": "models.language_model:workload",
    "language_model_small": "models.language_model:small",
    "shakespeare": "models.shakespeare:workload",
}
