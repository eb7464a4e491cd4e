"""What a run on Kubernetes consists of, as data: groups, tasks and options."""

import dataclasses
import functools
import posixpath
import re
from collections.abc import Sequence

import tfdistill
from tfdistill.exchange import signing
from tfdistill.launcher import fields
from tfdistill.launcher import local_cluster
from tfdistill.launcher import trackers

MAX_LABEL = 63
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
)
_QUANTITY = re.compile(r"(?=.*[1-9])[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def error(option: str, must: str, received: object, remedy: str) -> ValueError:
    """Returns the one form that all errors about options take."""
    return ValueError(
        f"`{option}` must {must}; received {received!r}. {remedy}"
    )


def check_label(option: str, name: str, longest: str) -> None:
    """Checks a name from which names of pods and services are made."""
    if not _LABEL.fullmatch(name):
        raise error(
            option,
            "be a DNS label: lower-case letters, digits and hyphens, a letter "
            "first and no hyphen last",
            name,
            "Try one like run1.",
        )
    if len(longest) > MAX_LABEL:
        raise error(
            option,
            f"leave room for {longest!r}, which has {len(longest)} characters "
            f"and may have {MAX_LABEL}",
            name,
            f"Shorten it by {len(longest) - MAX_LABEL}.",
        )


def check_object(option: str, name: str | None) -> None:
    """Checks the name of an object that the cluster has already."""
    if name is None or (len(name) <= 253 and _SUBDOMAIN.fullmatch(name)):
        return
    must = "be the name of an object: lower-case letters, digits, - and ."
    raise error(option, must, name, "Look with kubectl get.")


def check_quantity(option: str, text: str | None) -> None:
    """Checks an amount of a resource."""
    if text is not None and not _QUANTITY.fullmatch(text):
        must = "be a positive quantity of Kubernetes"
        raise error(option, must, text, "Write it as, say, 2, 500m or 8Gi.")


def node_label(text: str) -> tuple[str, str]:
    """Splits `KEY=VALUE` of a node's label."""
    key, equals, value = text.partition("=")
    if equals and _KEY.fullmatch(key) and _VALUE.fullmatch(value):
        return key, value
    must = "be KEY=VALUE of a node's label"
    raise error("node_selector", must, text, "Say disktype=ssd.")


def toleration(text: str) -> dict[str, str]:
    """Turns `KEY[=VALUE][:EFFECT]` into a toleration of that taint.

    Without a value any is tolerated, without an effect all are.

    Example:
        >>> toleration("spot=true:NoSchedule")["operator"]
        'Equal'
    """
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    sound = _KEY.fullmatch(key) and _VALUE.fullmatch(value)
    if not sound or (colon and effect not in _EFFECTS):
        must = f"be KEY[=VALUE][:EFFECT], the effect one of {_EFFECTS}"
        raise error("toleration", must, text, "Say nvidia.com/gpu:NoSchedule.")
    result = {"key": key, "operator": "Equal" if equals else "Exists"}
    if equals:
        result["value"] = value
    if colon:
        result["effect"] = effect
    return result


def variable(text: str) -> tuple[str, str]:
    """Splits `NAME=VALUE` of an environment variable."""
    name, equals, value = text.partition("=")
    if equals and _VARIABLE.fullmatch(name):
        return name, value
    remedy = "Say TF_CPP_MIN_LOG_LEVEL=1."
    raise error("env", "be NAME=VALUE", text, remedy)


def literal(text: str) -> str:
    """Returns text that the kubelet turns back into the one given.

    In commands and values of variables it replaces `$(NAME)`, and `$$` by `$`.

    Example:
        >>> literal("$(HOME) costs $5")
        '$$(HOME) costs $$5'
    """
    return text.replace("$", "$$")


FORMS = ("job", "jobset")
# What JobSet puts after the name of a host to name a pod.
_POD_SUFFIX = "-abcde"
PORT = 2222
_CHIEF_RETURN = "TFDISTILL_CHIEF_RETURN_SECS"
_START_TIMEOUT = "TFDISTILL_START_TIMEOUT_SECS"
OWN_VARIABLES = (
    local_cluster.IDENTITY_VARIABLES
    | signing.VARIABLES
    | {_CHIEF_RETURN, _START_TIMEOUT, "TASK_INDEX"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(local_cluster.Topology):
    """A command to be run as groups of pods.

    The workdir is an absolute directory in the containers.

    Attributes:
        command: What each container runs.
    """

    command: Sequence[str]
    form: str = fields.option(
        "job: Indexed Jobs, which need no operator; jobset: one JobSet for "
        "each group",
        section="run",
        choices=FORMS,
    )
    name: str = fields.option("<NAME>: name of the run, a DNS label")
    image: str = fields.option("<IMAGE>: image of the containers")
    volume_claim: str | None = fields.option(
        "<NAME>: PersistentVolumeClaim with the workdir", None, section="files"
    )
    mount_path: str | None = fields.option(
        "<DIR>: where it is mounted; default the workdir", None
    )
    namespace: str | None = fields.option(
        "<NAME>: namespace of all objects; default kubectl's",
        None,
        section="pods",
    )
    key_secret: str | None = fields.option(
        "<NAME>: Secret whose entry 'key' signs the versions", None
    )
    service_account: str | None = fields.option(
        "<NAME>: service account of the pods", None
    )
    queue: str | None = fields.option(
        "<NAME>: LocalQueue of Kueue that admits each JobSet", None
    )
    cpus_per_worker: str | None = fields.option(
        "<CPUS>: for each worker and chief, such as 4", None
    )
    memory_per_worker: str | None = fields.option(
        "<SIZE>: for each worker and chief, such as 8Gi", None
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
    shm_size: str = fields.option("<SIZE>: of /dev/shm", "1Gi")
    run_as_user: int | None = fields.option(
        "<UID>: default the image's", None, kind=int, least=1
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
        "how often a group may be restarted", 10, section="limits", least=0
    )
    start_timeout_secs: int = fields.option(
        "how long tasks wait for each other", 1800, least=1
    )
    keep_secs: int | None = fields.option(
        "delete a job and its logs this long after it has ended; default never",
        None,
        kind=int,
        least=0,
    )

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        self._check_resources()
        self._check_names()
        self._check_paths()
        self._check_sharing()
        self._check_env()
        _ = self.node_labels, self.tolerations

    @functools.cached_property
    def variables(self) -> dict[str, str]:
        """What `env` sets."""
        return dict(variable(text) for text in self.env)

    @functools.cached_property
    def node_labels(self) -> dict[str, str]:
        """What `node_selector` asks of a node."""
        return dict(node_label(text) for text in self.node_selector)

    @functools.cached_property
    def tolerations(self) -> list[dict[str, str]]:
        """What `toleration` tolerates."""
        return [toleration(text) for text in self.toleration]

    def _check_resources(self) -> None:
        if self.ps_per_group and self.gpus_per_worker > 1:
            raise error(
                "gpus_per_worker",
                "be 0 or 1 if there are parameter servers",
                self.gpus_per_worker,
                "Ask for more workers with one GPU each.",
            )
        for name in (
            "cpus_per_worker",
            "memory_per_worker",
            "cpus_per_ps",
            "memory_per_ps",
            "shm_size",
        ):
            value = getattr(self, name)
            check_quantity(name, value)
            if value and name.endswith("_ps") and not self.ps_per_group:
                must = "be left out if ps_per_group is 0"
                raise error(name, must, value, "Leave it out.")

    def _check_names(self) -> None:
        longest = max(
            (
                self.host(self.num_groups - 1, task_type, size - 1)
                for task_type, size in self.sizes.items()
            ),
            key=len,
        )
        if self.form == "jobset":
            longest += _POD_SUFFIX
        check_label("name", self.name, longest)
        if self.namespace is not None:
            check_label("namespace", self.namespace, self.namespace)
        for name in ("volume_claim", "key_secret", "service_account"):
            check_object(name, getattr(self, name))
        if self.queue is not None:
            check_label("queue", self.queue, self.queue)
            if self.form != "jobset":
                raise error(
                    "queue",
                    "come with --form=jobset, whose groups Kueue admits whole",
                    self.queue,
                    "Leave it out.",
                )

    def _check_paths(self) -> None:
        for name in ("workdir", "mount_path"):
            path = getattr(self, name)
            if path is None:
                continue
            if path != posixpath.normpath(path) or path[:1] != "/":
                must = "be an absolute path without //, . and .. in it"
                raise error(name, must, path, "Say /mnt/run1.")
            if path == "/" or ":" in path:
                must = "be a directory other than / and without a colon"
                raise error(name, must, path, "Say /mnt/run1.")
        mounted = self.mount_path or self.workdir
        if posixpath.commonpath([mounted, self.workdir]) != mounted:
            remedy = "Mount the volume where the workdir can lie in it."
            must = f"lie in mount_path, {mounted!r}"
            raise error("workdir", must, self.workdir, remedy)
        if self.mount_path and not self.volume_claim:
            must = "be left out without volume_claim"
            remedy = "Name the claim."
            raise error("mount_path", must, self.mount_path, remedy)
        if self.exchange is not None and "://" not in self.exchange:
            if self.exchange[:1] != "/":
                must = "be a URL or an absolute path"
                remedy = "Say gs://bucket/run1/exchange."
                raise error("exchange", must, self.exchange, remedy)

    def _check_sharing(self) -> None:
        if self.volume_claim:
            return
        if self.ps_per_group:
            raise error(
                "volume_claim",
                "name a volume if there are parameter servers, since each "
                "of them writes its rows to the workdir and the exchange",
                self.volume_claim,
                "Make a PersistentVolumeClaim of ReadWriteMany.",
            )
        if self.num_groups > 1 and "://" not in (self.exchange or ""):
            raise error(
                "exchange",
                "be a URL if groups share no volume",
                self.exchange,
                "Pass --exchange=gs://bucket/run1, or --volume_claim with a "
                "claim of ReadWriteMany.",
            )

    def _check_env(self) -> None:
        for name in self.variables:
            if name in OWN_VARIABLES:
                raise error(
                    "env",
                    "leave alone what the manifests set for each task",
                    name,
                    "Use the options; the key comes from --key_secret.",
                )
        # Refuses unknown TFDISTILL_ names, and says which one is near.
        tfdistill.Cluster.from_env(self.variables)

    def group_name(self, group: int) -> str:
        """Returns the name of a group's service or JobSet."""
        return f"{self.name}-g{group}"

    def job_name(self, group: int, task_type: str) -> str:
        """Returns the name from which hosts of one type of task are made."""
        name = f"{self.group_name(group)}-{task_type}"
        # A JobSet numbers the Jobs of each kind, and has one here.
        return f"{name}-0" if self.form == "jobset" else name

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
            # As TensorFlow's guide to parameter servers asks of each server.
            waits["GRPC_FAIL_FAST"] = "use_caller"
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
