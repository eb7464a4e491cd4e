"""What a run on Kubernetes consists of, as data: groups, tasks and options."""

import dataclasses
import posixpath
import re
from collections.abc import Sequence

import tfdistill
from tfdistill.exchange import signing
from tfdistill.launcher import fields
from tfdistill.launcher import local_cluster
from tfdistill.launcher import trackers

PORT = 2222
_MAX_LABEL = 63
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# What JobSet puts after the name of a host to name a pod.
_POD_SUFFIX = "-abcde"
_CHIEF_RETURN = "TFDISTILL_CHIEF_RETURN_SECS"
_START_TIMEOUT = "TFDISTILL_START_TIMEOUT_SECS"
_OWN_VARIABLES = (
    local_cluster.IDENTITY_VARIABLES
    | signing.VARIABLES
    | {_CHIEF_RETURN, _START_TIMEOUT, "TASK_INDEX"}
)


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise ValueError(
                f"`{option}` must be NAME=VALUE; received {text!r}."
            )
    split = (text.partition("=") for text in texts)
    return {name: value for name, _, value in split}


def toleration(text: str) -> dict[str, str]:
    """Turns `KEY[=VALUE][:EFFECT]` into a toleration of that taint.

    Without a value any is tolerated, without an effect all are.

    Example:
        >>> toleration("spot=true:NoSchedule")["operator"]
        'Equal'
    """
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    result = {"key": key, "operator": "Equal" if equals else "Exists"}
    if equals:
        result["value"] = value
    if effect:
        result["effect"] = effect
    return result


def literal(text: str) -> str:
    """Returns text that the kubelet turns back into the one given.

    In commands and values of variables it replaces `$(NAME)`, and `$$` by `$`.

    Example:
        >>> literal("$(HOME) costs $5")
        '$$(HOME) costs $$5'
    """
    return text.replace("$", "$$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(local_cluster.Topology):
    """A command to be run as groups of pods.

    The workdir is an absolute directory in the containers.

    Attributes:
        command: What each container runs.
    """

    command: Sequence[str]
    name: str = fields.option(
        "<NAME>: name of the run, a DNS label", section="run"
    )
    image: str = fields.option("<IMAGE>: image of the containers")
    volume_claim: str | None = fields.option(
        "<NAME>: PersistentVolumeClaim with the workdir", None, section="files"
    )
    mount_path: str | None = fields.option(
        "<DIR>: mount point of that volume; default: the workdir", None
    )
    key_secret: str | None = fields.option(
        "<NAME>: Secret whose entry 'key' signs the versions",
        None,
        section="pods",
    )
    service_account: str | None = fields.option(
        "<NAME>: service account of the pods", None
    )
    queue: str | None = fields.option(
        "<NAME>: LocalQueue of Kueue that admits each JobSet", None
    )
    cpus_per_worker: str | None = fields.option(
        "<CPUS>: CPUs of each worker and chief, such as 4", None
    )
    memory_per_worker: str | None = fields.option(
        "<SIZE>: memory of each worker and chief, such as 8Gi", None
    )
    cpus_per_ps: str | None = fields.option(
        "<CPUS>: for each ps; default: as for a worker", None
    )
    memory_per_ps: str | None = fields.option(
        "<SIZE>: for each ps; default: as for a worker", None
    )
    gpus_per_worker: int = fields.option(
        "GPUs of each worker; one is best", 0, least=0
    )
    shm_size: str = fields.option("<SIZE>: size of /dev/shm", "1Gi")
    run_as_user: int | None = fields.option(
        "<UID>: user of the containers; default: the image's",
        None,
        kind=int,
        least=1,
    )
    node_selector: Sequence[str] = fields.option(
        "<KEY=VALUE>: label that a node must have", ()
    )
    toleration: Sequence[str] = fields.option(
        "<KEY[=VALUE][:EFFECT]>: taint that a node may have", ()
    )
    env: Sequence[str] = fields.option(
        "<NAME=VALUE>: variable to set for each task", ()
    )
    max_restarts: int = fields.option(
        "how many times a group can be restarted", 10, section="limits", least=0
    )
    start_timeout_secs: int = fields.option(
        "how long tasks wait for each other", 1800, least=1
    )

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        self._check_names()
        self._check_paths()
        self._check_together()
        taken = ", ".join(_OWN_VARIABLES & set(self.variables))
        self._require(
            not taken,
            "env",
            f"not set {taken}, which the manifests set",
            "Use the options instead; the key comes from --key-secret.",
        )
        # Refuses unknown TFDISTILL_ names, and says which one is near.
        tfdistill.Cluster.from_env(self.variables)
        _ = self.node_labels

    def _require(
        self, holds: object, option: str, must: str, remedy: str
    ) -> None:
        if not holds:
            raise ValueError(
                f"`{option}` must {must}; received "
                f"{getattr(self, option)!r}. {remedy}"
            )

    @property
    def variables(self) -> dict[str, str]:
        """What `env` sets."""
        return _pairs("env", self.env)

    @property
    def node_labels(self) -> dict[str, str]:
        """What `node_selector` asks of a node."""
        return _pairs("node_selector", self.node_selector)

    @property
    def tolerations(self) -> list[dict[str, str]]:
        """What `toleration` tolerates."""
        return [toleration(text) for text in self.toleration]

    def _check_names(self) -> None:
        """Checks that all names that are made of the run's own are labels.

        Kubernetes would refuse a pod long after its Job.
        """
        self._require(
            _LABEL.fullmatch(self.name),
            "name",
            "be a DNS label: lower-case letters, digits and hyphens, a letter "
            "first and no hyphen last",
            "Try one like run1.",
        )
        hosts = (
            self.host(self.num_groups - 1, task_type, size - 1)
            for task_type, size in self.sizes.items()
        )
        longest = max(hosts, key=len) + _POD_SUFFIX
        self._require(
            len(longest) <= _MAX_LABEL,
            "name",
            f"leave room for {longest!r}, which has {len(longest)} characters "
            f"and may have {_MAX_LABEL}",
            f"Shorten it by {len(longest) - _MAX_LABEL}.",
        )

    def _check_paths(self) -> None:
        must = "be an absolute path other than /, without .. and :"
        for name in ("workdir", "mount_path"):
            path = getattr(self, name) or "/run"
            clean = path == posixpath.normpath(path) and ":" not in path
            fits = clean and path[0] == "/" and path != "/"
            self._require(fits, name, must, "Say /mnt/run1.")
        mounted = self.mount_path or self.workdir
        self._require(
            posixpath.commonpath([mounted, self.workdir]) == mounted,
            "workdir",
            f"lie in mount_path, {mounted!r}",
            "Mount the volume so that it contains the workdir.",
        )

    def _check_together(self) -> None:
        """Checks options that a run without a volume lacks."""
        has_volume = bool(self.volume_claim)
        self._require(
            has_volume or not self.mount_path,
            "mount_path",
            "be left out without volume_claim",
            "Name the claim.",
        )
        self._require(
            has_volume or not self.ps_per_group,
            "volume_claim",
            "name a volume if there are parameter servers, since each of them "
            "writes its rows to the workdir and the exchange",
            "Create a PersistentVolumeClaim with ReadWriteMany.",
        )
        is_url = "://" in (self.exchange or "")
        self._require(
            has_volume or self.num_groups == 1 or is_url,
            "exchange",
            "be a URL if groups share no volume",
            "Pass --exchange=gs://bucket/run1, or --volume-claim with a "
            "ReadWriteMany claim.",
        )

    def group_name(self, group: int) -> str:
        """Returns the name of a group's JobSet."""
        return f"{self.name}-g{group}"

    def job_name(self, group: int, task_type: str) -> str:
        """Returns the name from which hosts of one type of task are made."""
        # A JobSet numbers the Jobs of each kind, and has one here.
        return f"{self.group_name(group)}-{task_type}-0"

    def host(self, group: int, task_type: str, index: int | str) -> str:
        """Returns the host name of one task."""
        return f"{self.job_name(group, task_type)}-{index}"

    def task_env(self, group: int, task_type: str) -> dict[str, str]:
        """Returns what all tasks of a type have in their environment.

        Pods of one type have one template. So if a worker is the chief, the
        other workers of its group cannot be kept from reporting to trackers.
        """
        cluster = tfdistill.Cluster(
            group=group,
            num_groups=self.num_groups,
            exchange=self.exchange,
            workdir=self.workdir,
        )
        waits = {_START_TIMEOUT: str(self.start_timeout_secs)}
        if self.ps_per_group:
            waits[_CHIEF_RETURN] = str(self.start_timeout_secs)
        return {
            "PYTHONUNBUFFERED": "1",
            **waits,
            **trackers.defaults(cluster),
            **self.variables,
            **trackers.silence(
                is_chief=task_type == "chief" or "chief" not in self.sizes
            ),
            **cluster.to_env(),
        }
