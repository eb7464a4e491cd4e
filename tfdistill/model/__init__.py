"""DistributedModel and CodistillModel: what Keras sees of a training.

Keras 3's own `fit` fails under `MultiWorkerMirroredStrategy` (keras#20585): it
reduces a batch tuple over the workers, and averages logs over a missing axis.
`DistributedModel` replaces both, around any model:

- losses are divided by the global batch (`training.global_batch`);
- gradients are summed over the replicas *before* the optimizer clips them
  (`training.trainer`), or each worker of parameter servers applies its own
  (`parameter_server.trainer`);
- logs come from metric states summed over all replicas, in one collective;
- files are written by the chief only (`training.guards`).

`CodistillModel` adds teachers to a step, and nothing else.
"""

from tfdistill.model.codistilled import CodistillModel as CodistillModel
from tfdistill.model.distributed import DistributedModel as DistributedModel
