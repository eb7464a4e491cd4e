"""Manifests for tests, and how the kubelet and the schemas read them."""

import re
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import yaml

from launch import kubernetes as __main__

REQUIRED = ("--name=run1", "--image=registry.example.com/train:1")


def write(capsys: Any, *options: str, command: tuple = ()) -> list[dict]:
    """The objects that the command line prints for these options."""
    known = [option.partition("=")[0] for option in options]
    given = [x for x in REQUIRED if x.partition("=")[0] not in known]
    if "--workdir" not in known:
        given.append("--workdir=/mnt/run1")
    if "--recipe" not in known and not command:
        command = ("python", "my_train.py")
    rest = ["--", *command] if command else []
    assert __main__.main([*given, *options, *rest]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def of_kind(objects: list[dict], kind: str) -> dict[str, dict]:
    return {x["metadata"]["name"]: x for x in objects if x["kind"] == kind}


def jobs(objects: list[dict]) -> dict[str, dict]:
    """The Jobs that JobSet makes of its own objects, by name."""
    found = {}
    for name, each in of_kind(objects, "JobSet").items():
        for replicated in each["spec"]["replicatedJobs"]:
            assert replicated["replicas"] == 1
            job = {"apiVersion": "batch/v1", "kind": "Job"}
            found[f"{name}-{replicated['name']}-0"] = {
                **job,
                **replicated["template"],
            }
    return found


def container(pod_template: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = pod_template["spec"]["containers"]
    return found


def expand(text: str, known: Mapping[str, str]) -> str:
    """Expands `$(NAME)` as the kubelet does in commands and variables."""

    def replace(match: re.Match) -> str:
        if match[0] == "$$":
            return "$"
        return known.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


def environment(
    found: Mapping[str, Any], annotations: Mapping[str, str]
) -> dict[str, str]:
    """The variables of a container, each in the light of those before it."""
    result: dict[str, str] = {}
    for each in found["env"]:
        if "valueFrom" in each:
            path = each["valueFrom"]["fieldRef"]["fieldPath"]
            name = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)[1]
            result[each["name"]] = annotations[name]
        else:
            result[each["name"]] = expand(each["value"], result)
    return result


def tasks(job: Mapping[str, Any]) -> Iterator[tuple[dict, list[str]]]:
    found = container(job["spec"]["template"])
    for index in range(job["spec"]["completions"]):
        annotation = "batch.kubernetes.io/job-completion-index"
        env = environment(found, {annotation: str(index)})
        yield env, [expand(part, env) for part in found["command"]]


def lost(given: Any, kept: Any, where: str) -> list[str]:
    """Paths of what is in one tree and not in another, defaults aside."""
    if isinstance(given, dict) and isinstance(kept, dict):
        pairs = [(given[k], kept.get(k), f"{where}.{k}") for k in given]
    elif isinstance(given, list) and isinstance(kept, list):
        if len(given) != len(kept):
            return [where]
        both = zip(given, kept, strict=True)
        pairs = [(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(both)]
    else:
        return [] if given == kept else [where]
    return [path for pair in pairs for path in lost(*pair)]
