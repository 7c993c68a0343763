"""What may be wrong with the Dockerfiles: against the repository's files and the project's own scripts."""

import fnmatch
import importlib
import re
from pathlib import PurePosixPath

from tests.support.deployment import ROOT, Deployment
from tests.support.dockerfile import Dockerfile

_PINNED = re.compile(r"[a-z0-9-]+(/[a-z0-9-]+)?:v?\d+\.\d+[\w.-]*")


def image_problems(deployment: Deployment, path: str, target: str) -> list[str]:
    """Everything that is wrong with one image; empty for a good one."""
    parsed = deployment.dockerfile(path)
    if parsed is None or not parsed.chain(target):
        return [f"{path}: no file or no target {target!r}"]
    return [
        f"{path}: {problem}"
        for problem in (
            *_base_problems(parsed),
            *_copy_problems(deployment, parsed),
            *_user_problems(parsed, target),
            *_program_problems(deployment, parsed, target),
        )
    ]


def program_of(deployment: Deployment, parsed: Dockerfile, target: str) -> str:
    """The `module:function` that the image starts; empty where it starts no script of the project."""
    entries = parsed.instructions(target, "ENTRYPOINT")
    scripts: dict[str, str] = deployment.pyproject()["project"]["scripts"]
    return scripts.get(entries[-1].arguments[0], "") if entries else ""


def image_problem(image: str) -> str:
    """Whether an image from elsewhere is named without a place and with a version."""
    place = image.partition("/")[0] if "/" in image else ""
    if "." in place or ":" in place or place == "localhost":
        return f"image {image} names a registry"
    return "" if _PINNED.fullmatch(image) else f"image {image} has no version of at least two parts"


def _base_problems(parsed: Dockerfile) -> list[str]:
    own = {stage.name for stage in parsed.stages}
    return [p for stage in parsed.stages if stage.base not in own and (p := image_problem(stage.base))]


def _copy_problems(deployment: Deployment, parsed: Dockerfile) -> list[str]:
    found: list[str] = []
    copied: list[str] = []
    for stage in parsed.stages:
        for instruction in stage.instructions:
            if instruction.word != "COPY":
                continue
            *sources, _ = instruction.arguments
            if (other := instruction.flags.get("from")) is not None:
                if parsed.stage(other) is None:
                    found.append(f"COPY --from={other}: no such stage")
                continue
            copied += sources
            found += [f"COPY {source}: not there" for source in sources if not (ROOT / source).exists()]
            found += [f"COPY {s}: left out by .dockerignore" for s in sources if _is_ignored(deployment, s)]
    packages: list[str] = deployment.pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    for needed in (*packages, "README.md", "LICENSE", "pyproject.toml"):
        if not any(PurePosixPath(needed).is_relative_to(source) for source in copied):
            found.append(f"{needed} is not copied, but the build needs it")
        elif _is_ignored(deployment, needed):
            found.append(f"{needed} is left out by .dockerignore, but the build needs it")
    return found


def _is_ignored(deployment: Deployment, path: str) -> bool:
    """The last pattern that matches the path or a folder above it decides."""
    ignored = False
    parts = PurePosixPath(path).parts
    prefixes = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for line in deployment.texts[".dockerignore"].splitlines():
        pattern = line.strip().removeprefix("!").rstrip("/")
        if not pattern or pattern.startswith("#"):
            continue
        if any(fnmatch.fnmatchcase(prefix, pattern) for prefix in prefixes):
            ignored = not line.strip().startswith("!")
    return ignored


def _user_problems(parsed: Dockerfile, target: str) -> list[str]:
    users = [i.text for i in parsed.instructions(target, "USER")]
    if not users or users[-1].partition(":")[0] in {"root", "0"}:
        return ["runs as root"]
    # By number: an orchestrator cannot tell whether a name is root's.
    runs = " && ".join(i.text for i in parsed.instructions(target, "RUN"))
    commands = [command.split() for command in runs.split("&&")]
    groups = {c[-1]: c[c.index("--gid") + 1] for c in commands if c[0] == "groupadd"}
    made = {
        f"{c[c.index('--uid') + 1]}:{groups.get(c[c.index('--gid') + 1])}": c[-1]
        for c in commands
        if c[0] == "useradd"
    }
    if (name := made.get(users[-1])) is None:
        return [f"user {users[-1]} is not made"]
    if ["chown", "-R", f"{name}:{name}", "/var/lib/lorikeet"] not in commands:
        return [f"user {users[-1]} does not own its directories"]
    return []


def _program_problems(deployment: Deployment, parsed: Dockerfile, target: str) -> list[str]:
    program = program_of(deployment, parsed, target)
    if not program:
        return ["the entry point is no script of the project"]
    module, _, function = program.partition(":")
    try:
        entry = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        return [f"{program}: {error}"]
    return [] if callable(entry) else [f"{program} cannot be called"]
