"""What may be wrong with compose.yaml: each command, flag, port, volume and variable against the code."""

import importlib.util
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorikeet_client.settings import ClientSettings
from lorikeet_rpc import health_check
from tests.support.compose_file import Volume, seconds, variables_of
from tests.support.deployment import COMPOSE, TLS, VARIABLES, Deployment
from tests.support.image_checks import image_problem, image_problems, program_of
from tests.support.service_settings import SETTINGS, ReadSettings, read

_KEYS = {
    "build", "cap_drop", "command", "depends_on", "deploy", "environment", "healthcheck", "image", "init",
    "logging", "networks", "ports", "profiles", "read_only", "restart", "security_opt", "stop_grace_period",
    "tmpfs", "user", "volumes",
}  # fmt: skip
# Variables of others' programs, and the installed file that knows them.
_FOREIGN = {
    "TRITON_CACHE_DIR": "triton/knobs.py",
    "TRITON_LIBCUDA_PATH": "triton/knobs.py",
    "REDISCLI_AUTH": "",
}
_COMMAND = "LORIKEET_"  # variables of the command that the manager's image brings along
_MARGIN_S = 5.0  # between the drain's end and SIGKILL


def compose_problems(
    deployment: Deployment, *overrides: str, variables: Mapping[str, str] = VARIABLES
) -> list[str]:
    """Everything that is wrong; empty for a good deployment."""
    document = deployment.compose(*overrides, variables=variables)
    found: list[str] = []
    for name, service in document["services"].items():
        checks = (
            _shape_problems(document, name, service),
            _network_problems(document, name, service),
            _health_problems(service),
            _redis_problems(service) if name == "redis" else _program_problems(deployment, document, service),
        )
        found += [f"{name}: {problem}" for problems in checks for problem in problems]
    return found + _variable_problems(deployment) + _store_problems(document) + _scrape_problems(deployment)


def settings_of(deployment: Deployment, service: Mapping[str, Any]) -> ReadSettings | str:
    """The settings of a built service, or what its program says against them."""
    image = deployment.image_of(service)
    program = program_of(deployment, *image) if image else ""
    if program not in SETTINGS:
        return "starts none of the services"
    with tempfile.TemporaryDirectory() as directory:
        existing = Path(directory)
        for volume in map(Volume.parse, service["volumes"]):
            (existing / volume.target.lstrip("/")).mkdir(parents=True)
        if (existing / "tls").exists():
            for name in ("ca.pem", "cert.pem", "key.pem"):
                (existing / "tls" / name).touch()
        return read(program, service["command"], service["environment"], existing)


def _shape_problems(document: Mapping[str, Any], name: str, service: Mapping[str, Any]) -> list[str]:
    found = [f"unknown key {key}" for key in service if key not in _KEYS]
    found += [] if service.get("restart") == "unless-stopped" else ["is not restarted"]
    found += [] if service.get("read_only") else ["its root file system is writable"]
    found += [] if service.get("cap_drop") == ["ALL"] else ["keeps capabilities"]
    found += [
        f"depends on {n}, which is not there"
        for n in service.get("depends_on", {})
        if n not in document["services"]
    ]
    declared = document["volumes"]
    for volume in map(Volume.parse, service["volumes"]):
        if volume.kind == "volume" and volume.source not in declared:
            found.append(f"volume {volume.source} is not declared")
    is_gpu = "gpu" in service.get("profiles", ())
    devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    if is_gpu != any("gpu" in device.get("capabilities", ()) for device in devices):
        found.append("a GPU is reserved for profile gpu, and for it alone")
    if name.startswith("inference") and not service.get("profiles"):
        found.append("an inference service without a profile")
    return found


def _network_problems(document: Mapping[str, Any], name: str, service: Mapping[str, Any]) -> list[str]:
    networks = service["networks"]
    found = [f"network {n} is not declared" for n in networks if n not in document["networks"]]
    if not document["networks"]["backend"].get("internal"):
        found.append("the backend is not internal")
    if name == "redis" and (set(networks) != {"backend"} or service.get("ports")):
        found.append("is reachable from outside")
    return found


def _health_problems(service: Mapping[str, Any]) -> list[str]:
    health = service.get("healthcheck", {})
    match health.get("test"):
        case ["CMD", "python", "-m", module, *arguments]:
            if importlib.util.find_spec(module) is None or module != health_check.__name__:
                return [f"health check: no module {module}"]
            address = [a for a in arguments if not a.startswith(("--", "/"))]
            ports = {port.rpartition(":")[2] for port in service["ports"]}
            if [a.rpartition(":")[2] for a in address] != sorted(ports):
                return [f"health check: {address} is not the port that the service listens on"]
            has_tls = "--tls-ca" in arguments
            if has_tls != any(name.endswith("_TLS_CERT") for name in service["environment"]):
                return ["health check: TLS on one side only"]
        case ["CMD-SHELL", command]:
            if not re.fullmatch(r"redis-cli -p \d+ ping \| grep -qx PONG", command):
                return [f"health check: unknown command {command!r}"]
        case other:
            return [f"health check: {other!r}"]
    if seconds(health["timeout"]) <= health_check.DEFAULT_TIMEOUT_S:
        return ["health check: it is cut off before its own timeout"]
    return []


def _redis_problems(service: Mapping[str, Any]) -> list[str]:
    shell, _, script = service["command"]
    found = [] if shell == "sh" else ["its command is no shell's"]
    options = dict(re.findall(r"--([a-z-]+) (\S+)", script))
    wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
    found += [f"{k} is not {v}" for k, v in wanted.items() if options.get(k) != v]
    if options.get("dir") not in {Volume.parse(v).target for v in service["volumes"]}:
        found.append("its directory is not a volume")
    if "requirepass $REDISCLI_AUTH" not in script or not service["environment"].get("REDISCLI_AUTH"):
        found.append("asks for no password")
    if f"-p {options.get('port')} " not in service["healthcheck"]["test"][1]:
        found.append("health check: another port")
    if service.get("user") in {None, "root", "0"}:
        found.append("runs as root")
    return [*found, *filter(None, [image_problem(service["image"])]), *_foreign_problems(service)]


def _program_problems(
    deployment: Deployment, document: Mapping[str, Any], service: Mapping[str, Any]
) -> list[str]:
    build = service["build"]
    if problems := image_problems(deployment, build["dockerfile"], build.get("target", "")):
        return problems
    image = deployment.image_of(service)
    assert image is not None
    read_settings = settings_of(deployment, service)
    if isinstance(read_settings, str):
        return [read_settings]
    found = _port_problems(image[0].instructions(image[1], "EXPOSE"), service, read_settings)
    found += _volume_problems(image[0].instructions(image[1], "RUN"), service, read_settings)
    if service.get("user"):
        found.append("the image's own user is meant to run it")
    grace_s = seconds(service.get("stop_grace_period", "10s"))
    if grace_s < read_settings.values.drain_grace_s + _MARGIN_S:
        found.append(f"is killed after {grace_s:g} s, while it may drain for longer")
    for node in getattr(read_settings.values, "nodes", ()):
        found += _node_problems(deployment, document, node)
    if url := getattr(read_settings.values, "redis_url", None):
        host = re.search(r"@([\w-]+):(\d+)/", url.get_secret_value())
        redis = document["services"]["redis"]["command"][2]
        if host is None or host[1] not in document["services"] or f"--port {host[2]} " not in redis:
            found.append("its Redis is nowhere")
    if build["dockerfile"] == "deploy/adapter-manager.Dockerfile":
        found += _command_problems(deployment, document, service, read_settings.ports()["listen"])
    return found + _foreign_problems(service)


def _port_problems(exposed: Sequence[Any], service: Mapping[str, Any], settings: ReadSettings) -> list[str]:
    ports = settings.ports()
    found: list[str] = []
    if {int(word) for i in exposed for word in i.arguments} != set(ports.values()):
        found.append(f"EXPOSE is not {sorted(ports.values())}, on which it listens")
    published = [int(port.rpartition(":")[2]) for port in service.get("ports", ())]
    if published != [ports["listen"]]:
        found.append(f"publishes {published}, not its own port {ports['listen']}")
    if not all(port.startswith("127.0.0.1:") for port in service.get("ports", ())):
        found.append("is published beyond this host by default")
    return found


def _volume_problems(runs: Sequence[Any], service: Mapping[str, Any], settings: ReadSettings) -> list[str]:
    mounts = {volume.target: volume for volume in map(Volume.parse, service["volumes"])}
    directories = settings.directories()
    found = [f"{name} {path} is not a volume" for name, path in directories.items() if path not in mounts]
    writable = {directories["data_dir"], directories.get("store_url", "")}
    made = " ".join(i.text for i in runs)
    for target, volume in mounts.items():
        if volume.read_only == (target in writable):
            found.append(f"volume {target} is {'read only' if volume.read_only else 'writable'}")
        if volume.kind == "volume" and not re.search(rf"mkdir -p [^&]*{re.escape(target)}(\s|$)", made):
            found.append(f"volume {target} is not made in the image, so root would own it")
    for name, value in service["environment"].items():
        if name.endswith("_DIR") and not any(value.startswith(f"{path}/") for path in writable - {""}):
            found.append(f"{name} lies on no volume")
    return found


def _node_problems(deployment: Deployment, document: Mapping[str, Any], node: str) -> list[str]:
    """Whichever profile is chosen, the node's name must be somebody's."""
    host, _, port = node.rpartition(":")
    services: Mapping[str, Any] = document["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", ())}
    for name, service in services.items():
        networks = service["networks"]
        aliases = networks["backend"].get("aliases", ()) if isinstance(networks, dict) else ()
        if host in (name, *aliases) and "build" in service:
            settings = settings_of(deployment, service)
            if isinstance(settings, ReadSettings) and settings.ports()["listen"] == int(port):
                profiles -= set(service.get("profiles", ()))
    return [f"node {node} is nowhere with profile {profile}" for profile in sorted(profiles)]


def _command_problems(
    deployment: Deployment, document: Mapping[str, Any], service: Mapping[str, Any], port: int
) -> list[str]:
    """Whether `lorikeet` in the manager's container finds both services; the token comes from outside."""
    given = {
        name.removeprefix(_COMMAND).lower(): value
        for name, value in service["environment"].items()
        if name.startswith(_COMMAND)
    }
    found = [f"{_COMMAND}{n.upper()}: no such setting" for n in given if n not in ClientSettings.model_fields]
    if "inference" not in given:
        found.append("LORIKEET_INFERENCE is not set: the command would look for a node in this container")
    else:
        found += _node_problems(deployment, document, given["inference"])
    # By the name that the certificate has.
    if given.get("manager") != f"localhost:{port}":
        found.append(f"LORIKEET_MANAGER is not localhost:{port}")
    if given.get("tls_ca_file") != service["environment"].get("ADAPTER_MANAGER_NODES_TLS_CA"):
        found.append("LORIKEET_TLS_CA_FILE is not the authority that the manager trusts")
    return found


def _foreign_problems(service: Mapping[str, Any]) -> list[str]:
    prefixes = (*(prefix for _, prefix in SETTINGS.values()), _COMMAND)
    names = [name for name in service.get("environment", {}) if not name.startswith(prefixes)]
    found = [f"{name}: nobody reads it" for name in names if name not in _FOREIGN]
    for name in names:
        if evidence := _FOREIGN.get(name):
            package, _, file = evidence.partition("/")
            spec = importlib.util.find_spec(package)
            if spec and spec.origin and name not in (Path(spec.origin).parent / file).read_text():
                found.append(f"{name}: {package} does not read it any more")
    return found


def _variable_problems(deployment: Deployment) -> list[str]:
    """.env's example names every variable that the files use, and secrets are demanded."""
    used = variables_of([deployment.texts[COMPOSE], deployment.texts[TLS]])
    listed = set(re.findall(r"^(?:# )?([A-Z_]+)=", deployment.texts["deploy/env.example"], re.MULTILINE))
    found = [f"env.example does not name {name}" for name in used if name not in listed]
    found += [
        f"env.example names {n}, which nothing uses"
        for n in listed - used.keys() - {"COMPOSE_PROFILES", "COMPOSE_FILE"}
    ]
    demanded = (
        "LORIKEET_NODE_TOKEN",
        "LORIKEET_REDIS_PASSWORD",
        "LORIKEET_MODEL_DIR",
        "LORIKEET_MODEL_NAME",
    )
    found += [f"{name} is not demanded" for name in demanded if not used.get(name)]
    texts = deployment.texts[COMPOSE] + deployment.texts[TLS]
    # A use that does not demand it would be an empty secret where only that file's variables are checked.
    found += [f"{n} may be empty" for n in demanded if re.search(rf"\$\{{{n}(:-[^}}]*)?\}}|\${n}\b", texts)]
    return found


def _store_problems(document: Mapping[str, Any]) -> list[str]:
    """Manager and nodes see the store as the same volume at the same path."""
    mounts = {
        name: {v.target: v for v in map(Volume.parse, service["volumes"])}
        for name, service in document["services"].items()
    }
    stores = {
        (name, m["/var/lib/lorikeet/artifacts"].source)
        for name, m in mounts.items()
        if "/var/lib/lorikeet/artifacts" in m
    }
    built = {name for name, service in document["services"].items() if "build" in service}
    if {name for name, _ in stores} != built or len({source for _, source in stores}) != 1:
        return [f"the artifact store is not shared: {sorted(stores)}"]
    return []


def _scrape_problems(deployment: Deployment) -> list[str]:
    targets = set(re.findall(r'"([\w-]+:\d+)"', deployment.texts["deploy/prometheus.yaml"]))
    wanted: set[str] = set()
    for name, service in deployment.compose()["services"].items():
        if "build" in service and "gpu" not in service.get("profiles", ()):
            settings = settings_of(deployment, service)
            if isinstance(settings, ReadSettings):
                wanted.add(f"{name}:{settings.ports().get('metrics_listen')}")
    return [] if targets == wanted else [f"prometheus.yaml scrapes {sorted(targets)}, not {sorted(wanted)}"]
