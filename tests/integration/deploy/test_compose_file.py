"""compose.yaml, the Dockerfiles and their companions name nothing that the code does not have.

No container engine is needed: the services' own settings read flags and variables, files are looked for.
"""

import re
import subprocess
import sys

import pytest

from tests.support.compose_checks import compose_problems
from tests.support.compose_file import MissingVariableError, interpolated, parse_compose
from tests.support.deployment import COMPOSE, ROOT, TLS, VARIABLES, Deployment

NODE, MANAGER = "deploy/inference-service.Dockerfile", "deploy/adapter-manager.Dockerfile"

# (file, what stands there, what somebody may write by mistake, words of the problem that must be found)
MISTAKES = [
    (COMPOSE, "--drain-grace-s=30", "--drain-grace=30", "unrecognized arguments"),
    (COMPOSE, "--device=cpu", "--device=tpu", "--device"),
    (COMPOSE, "--device=cuda", "--gpu", "unrecognized arguments"),
    (COMPOSE, "--listen=0.0.0.0:50052", "--listen=0.0.0.0:50053", "EXPOSE is not"),
    (COMPOSE, "--metrics-listen=0.0.0.0:9401", "--metrics-listen=0.0.0.0:9400", "EXPOSE is not"),
    (COMPOSE, ":50052:50052", ":50052:9402", "publishes [9402]"),
    (COMPOSE, "LORIKEET_PUBLISH:-127.0.0.1", "LORIKEET_PUBLISH:-0.0.0.0", "beyond this host"),
    (COMPOSE, "--data-dir=/var/lib/lorikeet/manager", "--data-dir=/data", "data_dir /data is not a volume"),
    (COMPOSE, "--store-url=file:///var/lib/lorikeet/artifacts", "--store-url=file:///s", "store_url /s"),
    (COMPOSE, "--store-url=file:///var/lib/lorikeet/artifacts", "--nodes-tls-ca=ca.pem", "is writable"),
    (COMPOSE, "INFERENCE_NODE_TOKEN:", "INFERENCE_NODE_SECRET:", "INFERENCE_NODE_SECRET: no such setting"),
    (COMPOSE, "ADAPTER_MANAGER_INSECURE_LISTEN", "ADAPTER_MANAGER_INSECURE", "no such setting"),
    (COMPOSE, "TRITON_CACHE_DIR:", "TRITON_CACHE_PATH:", "nobody reads it"),
    (COMPOSE, "node/triton", "triton", "TRITON_CACHE_DIR lies on no volume"),
    (COMPOSE, "artifacts:/var/lib/lorikeet/artifacts:ro", "node-cache:/var/lib/lorikeet/artifacts:ro",
     "not shared"),
    (COMPOSE, "artifacts:/var/lib/lorikeet/artifacts:ro", "artifacts:/var/lib/lorikeet/artifacts",
     "is writable"),
    (COMPOSE, "manager-data:/var/lib", "manager-files:/var/lib", "manager-files is not declared"),
    (COMPOSE, "lorikeet_rpc.health_check", "lorikeet_rpc.healthcheck", "no module lorikeet_rpc.healthcheck"),
    (COMPOSE, '"localhost:50052"', '"localhost:50051"', "not the port"),
    (COMPOSE, "redis-cli -p 6379", "redis-cli -p 6380", "another port"),
    (COMPOSE, "timeout: 5s", "timeout: 2s", "cut off"),
    (COMPOSE, "stop_grace_period: 45s", "stop_grace_period: 30s", "killed after 30 s"),
    (COMPOSE, "restart: unless-stopped", 'restart: "no"', "not restarted"),
    (COMPOSE, "read_only: true", "read_only: false", "writable"),
    (COMPOSE, "cap_drop: [ALL]", "cap_drop: [NET_RAW]", "capabilities"),
    (COMPOSE, "user: redis", "user: root", "redis: runs as root"),
    (COMPOSE, "--appendonly yes", "--appendonly no", "appendonly is not yes"),
    (COMPOSE, "--appendfsync always", "--appendfsync everysec", "appendfsync is not always"),
    (COMPOSE, "requirepass $$REDISCLI_AUTH", "", "asks for no password"),
    (COMPOSE, "--dir /data", "--dir /tmp", "its directory is not a volume"),
    (COMPOSE, "networks: [backend]", "networks: [backend, frontend]", "redis: is reachable from outside"),
    (COMPOSE, "internal: true", "internal: false", "not internal"),
    (COMPOSE, "@redis:6379/0", "@redis:6380/0", "its Redis is nowhere"),
    (COMPOSE, "LORIKEET_NODES:-inference-service:50051", "LORIKEET_NODES:-inference:50051",
     "node inference:50051"),
    (COMPOSE, "aliases: [inference-service]", "aliases: [inference]", "is nowhere with profile gpu"),
    (COMPOSE, "dockerfile: deploy/adapter-manager.Dockerfile", "dockerfile: Dockerfile", "no file"),
    (COMPOSE, "target: cpu", "target: slim", "no target 'slim'"),
    (COMPOSE, "capabilities: [gpu]", "capabilities: [utility]", "a GPU is reserved"),
    (COMPOSE, "redis: {condition", "valkey: {condition", "depends on valkey"),
    (COMPOSE, "stop_grace_period: 45s", "stop_grace: 45s", "stop_grace"),
    (COMPOSE, "image: redis:7.4-bookworm", "image: redis:latest", "no version"),
    (COMPOSE, "image: redis:7.4-bookworm", "image: registry.example.com/redis:7.4", "names a registry"),
    (COMPOSE, "${LORIKEET_TENANT:-demo}", "${LORIKEET_FIRST:-demo}", "does not name LORIKEET_FIRST"),
    (COMPOSE, "${LORIKEET_MODEL_NAME:?", "${LORIKEET_MODEL_NAME:-", "LORIKEET_MODEL_NAME may be empty"),
    (COMPOSE, "LORIKEET_INFERENCE:", "LORIKEET_NODE:", "LORIKEET_NODE: no such setting"),
    (COMPOSE, "LORIKEET_INFERENCE: inference-service", "LORIKEET_INFERENCE: localhost", "is nowhere"),
    (COMPOSE, "LORIKEET_MANAGER: localhost:50052", "LORIKEET_MANAGER: localhost", "LORIKEET_MANAGER is not"),
    (COMPOSE, "${LORIKEET_REDIS_PASSWORD:?", "${LORIKEET_REDIS_PASSWORD:-",
     "LORIKEET_REDIS_PASSWORD may be empty"),
    ("deploy/env.example", "LORIKEET_NODE_TOKEN=", "LORIKEET_TOKEN=", "does not name LORIKEET_NODE_TOKEN"),
    ("deploy/prometheus.yaml", "adapter-manager:9402", "adapter-manager:9401", "prometheus.yaml scrapes"),
    (".dockerignore", "!inference_service", "", "inference_service is left out"),
    (".dockerignore", "clients/node", "clients", "left out by .dockerignore"),
    (NODE, "USER 10001:10001\nWORKDIR", "WORKDIR", "runs as root"),
    (NODE, "/var/lib/lorikeet lorikeet", "/var/lib/lorikeet parrot", "does not own"),
    (NODE, "/var/lib/lorikeet/node", "/var/lib/lorikeet/cache", "is not made in the image"),
    (NODE, "COPY kernels kernels", "COPY kernel kernel", "COPY kernel: not there"),
    (NODE, "COPY clients clients", "", "clients/lorikeet_admin is not copied"),
    (NODE, "--from=build-cpu", "--from=builder", "--from=builder: no such stage"),
    (".dockerignore", "!constraints-gpu.txt", "", "constraints-gpu.txt: left out"),
    (NODE, 'ENTRYPOINT ["lorikeet-inference"]', 'ENTRYPOINT ["lorikeet-infer"]', "no script of the project"),
    (NODE, "python:3.12-slim-bookworm", "python:slim", "no version"),
    (NODE, "EXPOSE 50051 9401", "EXPOSE 50051", "EXPOSE is not"),
    (MANAGER, "chown -R lorikeet:lorikeet", "chown -R nobody:nogroup", "does not own"),
    (MANAGER, "USER 10001:10001", "USER 0:0", "runs as root"),
    (MANAGER, "USER 10001:10001", "USER 10002:10001", "user 10002:10001 is not made"),
    ("pyproject.toml", "adapter_manager.__main__:main", "adapter_manager.main:main", "adapter_manager.main"),
    (TLS, "INFERENCE_TLS_CERT:", "INFERENCE_TLS_CERTIFICATE:", "no such setting"),
    (TLS, "INFERENCE_TLS_KEY: /tls/key.pem", "INFERENCE_TLS_KEY: /tls/server.key", "--tls-key"),
    (TLS, "LORIKEET_TLS_CA_FILE: /tls/ca.pem", "", "LORIKEET_TLS_CA_FILE is not"),
    (TLS, '"--tls-ca", "/tls/ca.pem", "localhost:50051"', '"localhost:50051"', "TLS on one side only"),
]  # fmt: skip


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    """As it is."""
    return Deployment.read()


@pytest.mark.parametrize("overrides", [(), (TLS,)])
def test_everything_named_exists(deployment: Deployment, overrides: tuple[str, ...]) -> None:
    """Commands, flags, ports, volumes, users, variables, files."""
    assert compose_problems(deployment, *overrides) == []


def test_a_second_node_as_the_guide_shows_it(deployment: Deployment) -> None:
    """The guide's override file, read as Compose would: nothing is wrong with the profile that it extends."""
    snippet, _ = re.findall(r"```yaml\n(.*?)```", deployment.texts["docs/deploy.md"], re.DOTALL)
    nodes = re.search(r"`LORIKEET_NODES=(\S+)`", deployment.texts["docs/deploy.md"])
    assert nodes
    shown = Deployment({**deployment.texts, "override": snippet})
    variables = {**VARIABLES, "LORIKEET_NODES": nodes[1]}
    found = compose_problems(shown, "override", variables=variables)
    assert found == ["adapter-manager: node inference-service-2:50051 is nowhere with profile gpu"]
    second = shown.compose("override")["services"]["inference-service-2"]
    assert second["command"] == deployment.compose()["services"]["inference-service"]["command"]
    assert second["volumes"][1:] == [
        "artifacts:/var/lib/lorikeet/artifacts:ro",
        "node-cache-2:/var/lib/lorikeet/node",
    ]


def test_a_second_node_with_tls_as_the_guide_shows_it(deployment: Deployment) -> None:
    """The guide's list of files: the second node is still there, and speaks TLS as the first does."""
    guide = deployment.texts["docs/deploy.md"]
    first, second = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    without, with_nodes = (
        line.split(":") for line in re.findall(r"^COMPOSE_FILE=(\S+)$", guide, re.MULTILINE)
    )
    assert without == [COMPOSE, TLS]
    assert with_nodes == [COMPOSE, "compose.override.yaml", TLS, "compose.nodes-tls.yaml"]
    shown = Deployment({**deployment.texts, "compose.override.yaml": first, "compose.nodes-tls.yaml": second})
    nodes = re.search(r"`LORIKEET_NODES=(\S+)`", guide)
    assert nodes
    variables = {**VARIABLES, "LORIKEET_NODES": nodes[1]}
    found = compose_problems(shown, *with_nodes[1:], variables=variables)
    assert found == ["adapter-manager: node inference-service-2:50051 is nowhere with profile gpu"]
    services = shown.compose(*with_nodes[1:])["services"]
    for name in ("environment", "healthcheck"):
        assert services["inference-service-2"][name] == services["inference-service"][name]


def test_the_gpu_image_has_the_measured_pair(deployment: Deployment) -> None:
    """The figures hold for one torch and one triton: the image installs those, and no CPU build."""
    pins = re.findall(r"^(torch|triton)==(\S+)$", deployment.texts["constraints-gpu.txt"], re.MULTILINE)
    measured = re.findall(r"\b(torch|triton) (\d+\.\d+\.\d+)", deployment.texts["docs/performance.md"])
    assert set(pins) == set(measured)
    assert len(pins) == 2
    dockerfile = deployment.dockerfile(NODE)
    assert dockerfile
    (source,) = [i.flags["from"] for i in dockerfile.instructions("gpu", "COPY")]
    runs = " ".join(i.text for i in dockerfile.instructions(source, "RUN"))
    assert "-c constraints-gpu.txt" in runs
    assert not [i for i in dockerfile.instructions(source, "ARG") if i.text.startswith("PIP_EXTRA_INDEX_URL")]


@pytest.mark.parametrize(("path", "old", "new", "words"), MISTAKES)
def test_a_mistake_is_found(deployment: Deployment, path: str, old: str, new: str, words: str) -> None:
    """Each check can fail: one word changed gives the problem that names it."""
    found = compose_problems(deployment.changed(path, old, new), *((TLS,) if path == TLS else ()))
    assert [problem for problem in found if words in problem], found


@pytest.mark.parametrize(
    "name", ["LORIKEET_NODE_TOKEN", "LORIKEET_REDIS_PASSWORD", "LORIKEET_MODEL_DIR", "LORIKEET_MODEL_NAME"]
)
def test_what_is_missing_is_demanded_by_name(deployment: Deployment, name: str) -> None:
    """Unset or empty, nothing starts; the message says where to set it."""
    for variables in ({**VARIABLES, name: ""}, {k: v for k, v in VARIABLES.items() if k != name}):
        with pytest.raises(MissingVariableError, match=rf"{name}: set it in .env, see deploy/env.example"):
            deployment.compose(variables=variables)


def test_variables_of_compose() -> None:
    """The reader's own rules: defaults, demands, and a dollar that is none."""
    assert interpolated("${A:-x} ${B-y} $C $$D ${E:-}", {"A": "", "B": "", "C": "c"}) == "x  c $D "
    base = "services: {a: {command: [x], ports: ['1:1'], volumes: ['v:/d', 'w:/e']}}"
    over = "services: {a: {command: [y], ports: !override ['2:2'], volumes: ['z:/d:ro']}}"
    services = parse_compose([base, over])["services"]
    assert services["a"] == {"command": ["y"], "ports": ["2:2"], "volumes": ["w:/e", "z:/d:ro"]}


def test_the_manager_and_the_command_need_no_torch() -> None:
    """The manager's image leaves out torch and triton: with both barred all its programs still import."""
    program = (
        "import sys\n"
        "class Barred:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'triton'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Barred())\n"
        "import adapter_manager.__main__, lorikeet_admin.__main__, lorikeet_rpc.health_check\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_requirements_for_an_image() -> None:
    """The project's own list, less what is left out; a name that is not there is an error."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "deploy/requirements.py", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    everything = run().stdout.splitlines()
    lean = run("--without", "torch", "--without", "triton").stdout.splitlines()
    assert {line.partition(">")[0] for line in set(everything) - set(lean)} == {"torch", "triton"}
    assert len(lean) == len(everything) - 2
    assert "no-such-thing" in run("--without", "no-such-thing").stderr
