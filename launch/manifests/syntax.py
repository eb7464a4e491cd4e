"""The syntax of what Kubernetes takes: names, quantities, selectors."""

import re

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
    """Checks a name from which names of pods and services are made.

    Args:
        option: Whose value the name is.
        name: The name.
        longest: The longest name that is made from it.

    Raises:
        ValueError: One of them is no DNS label (RFC 1035).
    """
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
    """Checks the name of an object that the cluster has already.

    Raises:
        ValueError: It is no DNS subdomain (RFC 1123).
    """
    if name is None or (len(name) <= 253 and _SUBDOMAIN.fullmatch(name)):
        return
    must = "be the name of an object: lower-case letters, digits, - and ."
    raise error(option, must, name, "Look with kubectl get.")


def check_quantity(option: str, text: str | None) -> None:
    """Checks an amount of a resource.

    Raises:
        ValueError: It is no positive quantity.
    """
    if text is not None and not _QUANTITY.fullmatch(text):
        must = "be a positive quantity of Kubernetes"
        raise error(option, must, text, "Write it as, say, 2, 500m or 8Gi.")


def node_selector(option: str, text: str) -> tuple[str, str]:
    """Splits `KEY=VALUE` of a node's label.

    Raises:
        ValueError: It is none.
    """
    key, equals, value = text.partition("=")
    if equals and _KEY.fullmatch(key) and _VALUE.fullmatch(value):
        return key, value
    raise error(
        option, "be KEY=VALUE of a node's label", text, "Say disktype=ssd."
    )


def toleration(option: str, text: str) -> dict[str, str]:
    """Turns `KEY[=VALUE][:EFFECT]` into a toleration of that taint.

    Without a value any is tolerated, without an effect all are.

    Raises:
        ValueError: It is none.

    Example:
        >>> toleration("toleration", "spot=true:NoSchedule")["operator"]
        'Equal'
    """
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    sound = _KEY.fullmatch(key) and _VALUE.fullmatch(value)
    if not sound or (colon and effect not in _EFFECTS):
        must = f"be KEY[=VALUE][:EFFECT], the effect one of {_EFFECTS}"
        raise error(option, must, text, "Say nvidia.com/gpu:NoSchedule.")
    result = {"key": key, "operator": "Equal" if equals else "Exists"}
    if equals:
        result["value"] = value
    if colon:
        result["effect"] = effect
    return result


def variable(option: str, text: str) -> tuple[str, str]:
    """Splits `NAME=VALUE` of an environment variable.

    Raises:
        ValueError: It is none.
    """
    name, equals, value = text.partition("=")
    if equals and _VARIABLE.fullmatch(name):
        return name, value
    remedy = "Say TF_CPP_MIN_LOG_LEVEL=1."
    raise error(option, "be NAME=VALUE", text, remedy)


def literal(text: str) -> str:
    """Returns text that the kubelet turns back into the one given.

    In commands and values of variables it replaces `$(NAME)`, and `$$` by `$`.

    Example:
        >>> literal("$(HOME) costs $5")
        '$$(HOME) costs $$5'
    """
    return text.replace("$", "$$")
