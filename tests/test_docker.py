"""The files of docker/, which no Docker engine runs here: linted by what knows their kinds, and held to the code."""

from __future__ import annotations

import ast
import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml
from test_structure import DOCS, ROOT, table

from repo_service.settings import Settings
from repo_service.version import __version__

DOCKER = ROOT / "docker"
DOCKERFILE = DOCKER / "Dockerfile"
COMPOSE = DOCKER / "compose.yaml"
MANIFESTS = sorted((DOCKER / "kubernetes").glob("*.yaml"))
PORT = Settings.model_fields["port"].default
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def documents() -> Iterator[Any]:
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text())


def manifest(kind: str) -> Any:
    (found,) = (document for document in documents() if document["kind"] == kind)
    return found


def compose() -> dict[str, Any]:
    """The services of the compose file, anchors and merges resolved."""
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return services


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of each stage of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[list[tuple[str, str]]] = []
    for line in filter(None, text.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest.strip()))
    return found


# Linted


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint for this machine")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_compose_file_meets_its_specification() -> None:
    options = compose_spec.PyOptions(apply_merge=True)
    read = options.from_yaml(COMPOSE.read_text())
    read.validate()
    assert sorted(read.service_names()) == sorted(compose())


@pytest.mark.parametrize("version", ["1.30", "1.33", "1.36"])
def test_manifests_meet_the_schemas_of_kubernetes(version: str) -> None:
    checked = [document for document in documents() if document["kind"] != "Kustomization"]
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)
    kinds = {document["kind"] for document in checked}
    assert kinds >= {"Deployment", "Service", "Job", "PodDisruptionBudget", "Secret", "ConfigMap"}


def test_the_kustomization_names_every_manifest() -> None:
    assert sorted(manifest("Kustomization")["resources"]) == [
        path.name for path in MANIFESTS if path.name != "kustomization.yaml"
    ]


def test_yaml_is_tidy() -> None:
    rules = "{extends: default, rules: {line-length: {max: 120}, document-start: disable, braces: {max-spaces-inside: 1}, comments: disable}}"
    command = [sys.executable, "-m", "yamllint", "--strict", "-d", rules, str(DOCKER)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


# Held to the code


def test_every_variable_is_a_setting() -> None:
    known = {row[0] for first in ("setting", "variable") for row in table(DOCS / "settings.md", first)}
    used = {
        name
        for path in sorted(DOCKER.rglob("*"))
        if path.is_file()
        for name in re.findall(r"\bKVGRAFT_[A-Z_]+", path.read_text())
    }
    assert used <= known


def test_values_are_those_that_settings_take() -> None:
    given = dict(re.findall(r"(KVGRAFT_\w+)=(\S+)", DOCKERFILE.read_text()))
    maps = [manifest("ConfigMap")["data"], compose()["kvgraft"]["environment"]]
    for environment in (given, *maps):
        values = {name.removeprefix("KVGRAFT_").lower(): value for name, value in environment.items()}
        Settings(**{name: value for name, value in values.items() if name in Settings.model_fields})


def test_what_is_asked_of_the_environment_is_in_the_example() -> None:
    asked = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))
    assert asked == set(re.findall(r"^(\w+)=", (DOCKER / "example.env").read_text(), re.MULTILINE))


def test_ports_agree() -> None:
    final = dict(stages()[-1])
    assert final["EXPOSE"] == str(PORT)
    assert f"KVGRAFT_PORT={PORT}" in final["ENV"]
    assert f"127.0.0.1:{PORT}/healthz" in final["HEALTHCHECK"]
    services = compose()
    assert services["kvgraft"]["expose"] == [str(PORT)]
    nginx = (DOCKER / "nginx.conf").read_text()
    assert f"server kvgraft:{PORT} resolve" in nginx
    (listens,) = re.findall(r"listen (\d+);", nginx)
    assert services["nginx"]["ports"] == [f"127.0.0.1:{PORT}:{listens}"]
    assert f":{listens}/healthz" in services["nginx"]["healthcheck"]["test"][-1]
    template = manifest("Deployment")["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": PORT}]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(PORT)
    assert manifest("Service")["spec"]["ports"] == [{"name": "http", "port": PORT, "targetPort": "http"}]


def images() -> Iterator[str]:
    for stage in stages():
        yield stage[0][1].partition(" AS ")[0]
    for service in compose().values():
        yield service["image"]
    for document in documents():
        yield from re.findall(r"'image': '([^']+)'", str(document))


def test_images_are_pinned_and_ours_is_this_version() -> None:
    found = set(images())
    assert len(found) >= 5
    for image in found:
        name, _, tag = image.partition(":")
        assert re.match(r"\d+\.\d+", tag), f"{image} is whatever it is today"
        assert name != "kvgraft" or tag == __version__
    assert {stage[0][1].partition(" AS ")[0] for stage in stages()} == {stages()[0][0][1].partition(" AS ")[0]}
    assert f"kvgraft:{__version__} ." in DOCKERFILE.read_text()


def test_the_final_layer_is_not_roots_and_builds_nothing() -> None:
    final = stages()[-1]
    user = [rest for word, rest in final if word == "USER"][-1]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    runs = " ".join(rest for word, rest in final if word == "RUN")
    assert not re.search(r"\b(apt|apt-get|pip|gcc|make|curl|wget)\b", runs)
    assert [rest for word, rest in final if word == "COPY"] == ["--from=build /opt/kvgraft /opt/kvgraft"]
    assert "--without-pip" in DOCKERFILE.read_text()
    for kind in "Deployment", "Job":
        pod = manifest(kind)["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == user
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {*container["resources"]["limits"]} == {*container["resources"]["requests"]} == {"cpu", "memory"}
            assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp"]
    for name in "kvgraft", "migrate", "nginx":
        service = compose()[name]
        assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (True, ["ALL"], ["/tmp"])


def test_the_build_is_given_all_that_the_wheel_is_made_of() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    wheel = build["build"]["targets"]["wheel"]
    needed = {
        "pyproject.toml",
        PROJECT["readme"],
        *PROJECT["license-files"],
        *wheel["packages"],
        *wheel["force-include"],
    }
    copied = {source for word, rest in stages()[0] if word == "COPY" for source in rest.split()[:-1]}
    assert copied == needed
    allowed = [
        line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in allowed) for name in needed)


def test_the_image_has_no_engine_and_the_extras_that_there_are() -> None:
    names = {re.split(r"[<>=\[; ]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert not names & {"torch", "transformers", "accelerate", "numpy"}
    (extras,) = re.findall(r'ARG EXTRAS="([\w,]+)"', DOCKERFILE.read_text())
    assert set(extras.split(",")) <= {*PROJECT["optional-dependencies"]} - {"engine", "dev"}


def test_probes_and_commands_are_those_of_the_service() -> None:
    text = (ROOT / "repo_service" / "api" / "service_routes.py").read_text()
    (container,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    probes = {name: container[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe", "startupProbe")}
    assert probes == {"livenessProbe": "/healthz", "readinessProbe": "/readyz", "startupProbe": "/healthz"}
    assert all(f'"{path}"' in text for path in probes.values())
    # The service takes 2 s at most to say that it can't work.
    assert container["readinessProbe"]["timeoutSeconds"] > 2
    commands = re.findall(
        r"app\.command\(\s*\"(\w+)\"", "".join(p.read_text() for p in (ROOT / "repo_service" / "cli").glob("*.py"))
    )
    ((job,),) = [manifest("Job")["spec"]["template"]["spec"]["containers"]]
    used = [
        *container["args"],
        *job["args"],
        *compose()["migrate"]["command"],
        *ast.literal_eval(dict(stages()[-1])["CMD"]),
    ]
    assert set(used) == {"serve", "migrate"} <= set(commands)


def test_there_is_time_to_end() -> None:
    settings = manifest("ConfigMap")["data"]
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    pause = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + int(settings["KVGRAFT_SHUTDOWN_SECONDS"])
    grace = int(compose()["kvgraft"]["stop_grace_period"].removesuffix("s"))
    assert grace > Settings.model_fields["shutdown_seconds"].default


def test_replicas_start_when_what_they_need_is_there() -> None:
    services = compose()
    assert services["kvgraft"]["deploy"]["replicas"] == manifest("Deployment")["spec"]["replicas"] == 2
    assert {name: need["condition"] for name, need in services["kvgraft"]["depends_on"].items()} == {
        "migrate": "service_completed_successfully",
        "bucket": "service_completed_successfully",
    }
    assert services["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    # A replica and the migration, on one index.
    assert services["migrate"]["environment"] == services["kvgraft"]["environment"]
    assert services["migrate"]["image"] == services["kvgraft"]["image"]
