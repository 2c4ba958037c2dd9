"""What is in deploy/ fits the server: flags, ports, paths; and unit and manifests are accepted by their own tools."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kvrig.server import REPOSITORY, free_port, our_command

pytestmark = pytest.mark.ours("these files are ours")

DEPLOY = REPOSITORY / "deploy"
UNIT = DEPLOY / "systemd" / "kvtier.service"
SOCKETS = UNIT.with_name("kvtier.socket")
ROUTER = REPOSITORY / "examples" / "router" / "router.py"

# Whatever the files say, this check disturbs no server and needs nothing of the machine. Later flags win.
HARMLESS = [
    "--port", "0", "--http-port", "0", "--l1-size-gb", "0.05", "--shm-name", "", "--state-dir", "none", "--check-config", "--strict-flags",
]  # fmt: skip


def check_flags(arguments, replace):
    """`kvtier server` accepts these arguments, with `replace` for what is installed with them; what it answers."""
    for name, here in replace.items():
        assert name in arguments, f"{name} is not in {arguments}"
        arguments = [here if argument == name else argument for argument in arguments]
    known = subprocess.run([*our_command(), "--help"], capture_output=True, text=True, check=True).stdout
    for argument in arguments:
        assert not argument.startswith("--") or f" {argument}" in known, f"no flag {argument}"
    done = subprocess.run([*our_command(), *arguments, *HARMLESS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(path):
    """The documents of a YAML file, by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(path.read_text())}


def manifests():
    """All documents of the Kubernetes base."""
    found = {}
    for path in sorted((DEPLOY / "kubernetes" / "base").glob("*.yaml")):
        found.update(documents(path))
    return found


def token_file(tmp_path):
    """A file as the Secret has it."""
    path = tmp_path / "tokens"
    path.write_text("admin ops 0123456789abcdef\nread prometheus fedcba9876543210\n")
    path.chmod(0o600)
    return str(path)


def unit_values(key, unit=UNIT):
    """Values of a key of a unit."""
    return re.findall(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)


def stop_seconds():
    """Seconds that a stop may take by default: what any supervisor must wait for."""
    known = subprocess.run([*our_command(), "--help"], capture_output=True, text=True, check=True).stdout
    flags = ("stop-timeout-seconds", "l2-drain-timeout-seconds")
    return sum(float(re.search(rf"--{flag} .*?\[default: (\d+)\]", known, re.DOTALL)[1]) for flag in flags)


# -- systemd ------------------------------------------------------------------------------------


# proves: docs/operate.md#systemd
def test_unit_starts_the_server_with_its_own_flags(tmp_path):
    """The command of the unit and the file it names are accepted, also with every key that is commented out."""
    [command] = unit_values("ExecStart")
    program, subcommand, *arguments = shlex.split(command)
    assert (Path(program).name, subcommand) == ("kvtier", "server")
    assert unit_values("Type") == ["notify"] and unit_values("ExecReload") == ["/bin/kill -HUP $MAINPID"]
    assert float(unit_values("TimeoutStopSec")[0]) > stop_seconds()
    state = tmp_path / "state"
    state.mkdir()
    shipped = (UNIT.parent / "kvtier.toml").read_text()
    text = shipped.replace("/var/lib/kvtier", str(state)).replace("/etc/kvtier/tokens", token_file(tmp_path))
    every_key = re.sub(r"^# ([a-z0-9-]+ = )", r"\1", text, flags=re.MULTILINE)
    assert every_key.count("\n# ") < text.count("\n# ")
    for content in (text, every_key):
        config = tmp_path / "kvtier.toml"
        config.write_text(content)
        answer = check_flags(arguments, {"/etc/kvtier/kvtier.toml": str(config)})
        assert answer.startswith("configuration OK")


# proves: docs/operate.md#systemd
def test_socket_unit_has_the_server_s_addresses(tmp_path):
    """A server without other flags than the unit's takes both sockets of kvtier.socket."""
    known = subprocess.run([*our_command(), "--help"], capture_output=True, text=True, check=True).stdout

    def default(flag):
        return re.search(rf"^ +--{flag} .*?\[default: (\S+)\]", known, re.DOTALL | re.MULTILINE)[1]

    addresses = [f"{default(prefix + 'host')}:{default(prefix + 'port')}" for prefix in ("", "http-")]
    assert unit_values("ListenStream", SOCKETS) == [each.replace("localhost", "127.0.0.1") for each in addresses]
    # With a path instead no more users may connect than by the server's own flag, and the path outlives the service.
    assert unit_values("SocketMode", SOCKETS) == [default("ipc-mode")]
    assert unit_values("SocketUser", SOCKETS) == unit_values("User") and unit_values("RuntimeDirectoryPreserve") == ["yes"]
    shipped = (UNIT.parent / "kvtier.toml").read_text()
    assert not re.search(r"^(http-)?(host|port) =", shipped, re.MULTILINE)


# proves: docs/operate.md#systemd
def test_systemd_accepts_the_unit(tmp_path):
    """`systemd-analyze verify` finds nothing, and `systemd-analyze security` calls the hardening OK."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed: the unit is not verified")
    [binary, *_] = our_command()
    unit = tmp_path / "kvtier.service"
    unit.write_text(UNIT.read_text().replace("/usr/bin/kvtier", binary))
    sockets = tmp_path / SOCKETS.name
    shutil.copy(SOCKETS, sockets)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit), str(sockets)], capture_output=True, text=True, timeout=60, check=False
    )
    ours = [line for line in done.stderr.splitlines() if "kvtier" in line]
    assert done.returncode == 0 and not ours, done.stderr
    # Exposure above 3.5 of 10 is an error.
    security = ["systemd-analyze", "security", "--offline=yes", "--threshold=35", "--no-pager", str(unit)]
    done = subprocess.run(security, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -- Docker -------------------------------------------------------------------------------------


# proves: docs/operate.md#docker
def test_image_has_the_ports_and_the_health_of_the_server(serve):
    """The default ports are exposed, and the command of HEALTHCHECK succeeds with a server, and not without."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    assert re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE) == ["5555 8080"]
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["65532:65532"]
    [command] = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", text, re.MULTILINE)
    program, *arguments = json.loads(command)
    assert program == "kvtier" and arguments[-1] == "http://127.0.0.1:8080"
    server = serve()
    [binary, _] = our_command()
    for address, status in [(server.http, 0), ("http://127.0.0.1:1", 1)]:
        done = subprocess.run([binary, *arguments[:-1], address], capture_output=True, timeout=60, check=False)
        assert done.returncode == status, done.stderr


# proves: docs/operate.md#docker
def test_compose_starts_the_server_with_its_own_flags(tmp_path):
    """Flags, the time to stop, the pool's space, and what the other services use of the server."""
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    server = services["kvtier"]
    subcommand, *arguments = server["command"]
    assert subcommand == "server" and server["build"]["target"] == "server"
    check_flags(arguments, {"/var/lib/kvtier/quotas": str(tmp_path / "quotas")})
    assert float(server["stop_grace_period"].removesuffix("s")) > stop_seconds()
    l1 = float(arguments[arguments.index("--l1-size-gb") + 1])
    assert float(server["shm_size"].removesuffix("gb")) >= 2 * l1, "two pools after a restart"
    engine = services["vllm"]
    assert engine["network_mode"] == "service:kvtier" and engine["ipc"] == "service:kvtier"
    transfer = json.loads(engine["command"][engine["command"].index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"] == {"kvtier.url": "tcp://localhost:5555"}
    prometheus = yaml.safe_load((DEPLOY / "docker" / "prometheus.yml").read_text())
    [job] = prometheus["scrape_configs"]
    assert job == {"job_name": "kvtier", "static_configs": [{"targets": ["localhost:8080"]}]}
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / "docker" / source).exists(), source


# -- Kubernetes ---------------------------------------------------------------------------------


# proves: docs/operate.md#kubernetes
def test_manifests_start_the_server_with_its_own_flags(tmp_path):
    """Flags and ports of the DaemonSet; memory for L1; the time to stop."""
    pod = manifests()["DaemonSet"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    subcommand, *arguments = container["args"]
    assert subcommand == "server"
    check_flags(arguments, {"/etc/kvtier/tokens/tokens": token_file(tmp_path)})
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"http": int(given["--http-port"])}
    memory = float(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert memory >= float(given["--l1-size-gb"]) + 2
    assert pod["terminationGracePeriodSeconds"] > stop_seconds()
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    used = [value for value in given.values() if value.startswith("/")]
    assert all(any(value.startswith(f"{mount}/") for mount in mounts) for value in used), "a path is not mounted"
    assert given["--state-dir"].startswith("/dev/shm/")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)


# proves: docs/operate.md#kubernetes
def test_manifests_find_each_other():
    """Selectors, ports and labels agree, and kustomize builds both variants where kubectl is installed."""
    found = manifests()
    label = {"app.kubernetes.io/name": "kvtier"}
    daemon = found["DaemonSet"]["spec"]
    selectors = [
        daemon["selector"]["matchLabels"],
        daemon["template"]["metadata"]["labels"],
        found["Service"]["spec"]["selector"],
        found["Service"]["metadata"]["labels"],
        found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        found["ServiceMonitor"]["spec"]["selector"]["matchLabels"],
    ]
    assert selectors == [label] * len(selectors)
    names = {port["name"] for port in daemon["template"]["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in found["Service"]["spec"]["ports"]} == names
    rules = found["NetworkPolicy"]["spec"]["ingress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == names
    claim, volume = found["PersistentVolumeClaim"], found["PersistentVolume"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    namespace = yaml.safe_load((DEPLOY / "kubernetes" / "base" / "kustomization.yaml").read_text())["namespace"]
    assert volume["spec"]["claimRef"] == {"namespace": namespace, "name": claim["metadata"]["name"]}
    assert claim["spec"]["resources"]["requests"] == volume["spec"]["capacity"]
    [term] = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [
        {"key": key, "operator": "In", "values": [value]} for key, value in daemon["template"]["spec"]["nodeSelector"].items()
    ]
    [scrape] = found["ServiceMonitor"]["spec"]["endpoints"]
    assert scrape["port"] in {port["name"] for port in found["Service"]["spec"]["ports"]}
    folder = DEPLOY / "kubernetes" / "base"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(path.name for path in folder.glob("*.yaml") if path.name != "kustomization.yaml")


# proves: docs/operate.md#kubernetes
@pytest.mark.parametrize("engine", ["engine.yaml", "engine-gpu.yaml"])
def test_pods_are_restricted_and_share_one_directory(engine):
    """Server and engine are as Pod Security `restricted` has it, of one user and with one /dev/shm, where the engine finds the socket."""
    found = manifests()
    assert found["Namespace"]["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    pods = [daemon["spec"]["template"]["spec"] for daemon in (found["DaemonSet"], documents(DEPLOY / "kubernetes" / engine)["Deployment"])]
    shared = []
    for pod in pods:
        context, [container] = pod["securityContext"], pod["containers"]
        assert context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert not [name for name in pod if name.startswith("host")]
        volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
        assert {kind for volume in volumes.values() for kind in volume} <= {"emptyDir", "secret", "persistentVolumeClaim"}
        [memory] = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        shared.append((context["runAsUser"], memory["subPath"], volumes[memory["name"]]))
    assert shared[0] == shared[1] == (65532, "kvtier", {"persistentVolumeClaim": {"claimName": "kvtier-shm"}})
    server, arguments = (pod["containers"][0]["args"] for pod in pods)
    transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    host = transfer.get("kvtier.url") or f"{transfer['lmcache.mp.host']}:{transfer['lmcache.mp.port']}"
    assert host == server[server.index("--host") + 1]


# proves: docs/operate.md#kubernetes
@pytest.mark.parametrize("variant", ["base", "gpu"])
def test_kustomize_builds_the_manifests(variant):
    """`kubectl kustomize` accepts them; on GPUs the server sees all."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed: the manifests are not built")
    folder = DEPLOY / "kubernetes" / variant
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    built = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    assert set(built) == set(manifests()) - {"Kustomization"}
    pod = built["DaemonSet"]["spec"]["template"]["spec"]
    assert ("runtimeClassName" in pod) == ("env" in pod["containers"][0]) == (variant == "gpu")


# proves: docs/operate.md#kubernetes
def test_probes_and_scrapes_are_answered(serve, tmp_path):
    """Probes need no token; the scrape needs the one of the Secret that is called prometheus."""
    found = manifests()
    server = serve(flags=["--http-token-file", token_file(tmp_path)])
    server.expect_trouble("refused: no token that is known")
    [container] = found["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "http"
        assert server.get(container[probe]["httpGet"]["path"])[0] == 200
    [scrape] = found["ServiceMonitor"]["spec"]["endpoints"]
    assert server.get(scrape["path"])[0] == 401
    command = ["curl", "-sS", "-H", "Authorization: Bearer fedcba9876543210", server.http + scrape["path"]]
    scraped = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "kvtier_build_info" in scraped


# -- Several hosts ------------------------------------------------------------------------------


def flag(arguments, name):
    """Values of a flag."""
    return [value for key, value in zip(arguments, arguments[1:], strict=False) if key == name]


def check_host(monkeypatch, server, engine, variables, names):
    """Flags of a server, which listens beyond loopback and reads by these names (peers and Valkey), and of the engine beside it."""
    assert {"KVTIER_HTTP_TOKENS", "KVTIER_PEER_PASSWORD"} <= set(variables)
    monkeypatch.setenv("KVTIER_HTTP_TOKENS", "read router 0123456789abcdef")
    monkeypatch.setenv("KVTIER_PEER_PASSWORD", "of-peers")
    subcommand, *arguments = server
    assert subcommand == "server"
    peers, shared = [json.loads(each) for each in flag(arguments, "--l2-adapter")]
    assert (peers, shared) == (
        {"type": "peers", "peers": [f"{names[0]}:{flag(arguments, '--peer-port')[0]}"]},
        {"type": "resp", "host": names[1], "port": 6379},
    )
    # No tier is asked here for an object.
    [peer_port] = flag(arguments, "--peer-port")
    check_flags([each for each in arguments if each not in flag(arguments, "--l2-adapter") + ["--l2-adapter"]], {peer_port: str(free_port())})
    transfer = json.loads(flag(engine, "--kv-transfer-config")[0])
    assert transfer["kv_connector_extra_config"] == {"kvtier.url": "tcp://localhost:5555"} and "--port" not in arguments


def check_router(arguments, hosts, model):
    """The example router knows these flags, and each host by its ports."""
    known = subprocess.run([sys.executable, ROUTER, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(f" {name}" in known for name in arguments if name.startswith("--"))
    assert flag(arguments, "--engine") == [f"http://{host}:8000=http://{host}:8080" for host in hosts]
    assert flag(arguments, "--tokenizer") == [model]


# proves: docs/hosts.md#three-hosts
def test_compose_has_three_hosts_behind_a_router(monkeypatch):
    """Each engine shares the namespaces of its server; all servers have one name for peers."""
    path = DEPLOY / "docker" / "hosts.yaml"
    services = yaml.safe_load(path.read_text())["services"]
    servers = [name for name in services if name.startswith("kvtier-")]
    assert len(servers) == 3 and "valkey" in services
    for name in servers:
        server, engine = services[name], services[name.replace("kvtier", "vllm")]
        [alias] = server["networks"]["default"]["aliases"]
        check_host(monkeypatch, server["command"], engine["command"], server["environment"], (alias, "valkey"))
        assert engine["network_mode"] == engine["ipc"] == f"service:{name}" and list(engine["depends_on"]) == [name]
        assert float(server["stop_grace_period"].removesuffix("s")) > stop_seconds()
        assert float(server["shm_size"].removesuffix("gb")) >= 2 * float(flag(server["command"], "--l1-size-gb")[0])
    router = services["router"]
    check_router(router["command"], servers, flag(engine["command"], "--model")[0])
    script = router["volumes"][1].split(":")[0]
    assert (path.parent / script).resolve() == ROUTER and "KVTIER_TOKEN" in router["environment"]


# proves: docs/hosts.md#three-hosts
def test_manifest_has_three_hosts_behind_a_router(monkeypatch):
    """Names, ports and labels agree, and nothing asks for more than Pod Security `restricted` allows."""
    found = {}
    for document in yaml.safe_load_all((DEPLOY / "kubernetes" / "hosts.yaml").read_text()):
        found.setdefault(document["kind"], {})[document["metadata"]["name"]] = document
    [namespace] = found["Namespace"]
    services, hosts = found["Service"], found["StatefulSet"]["host"]["spec"]
    pods = {"hosts": hosts["template"], **{name: each["spec"]["template"] for name, each in found["Deployment"].items()}}
    for name, template in pods.items():
        assert services[name]["spec"]["selector"] == template["metadata"]["labels"]
        assert template["spec"]["securityContext"].items() >= {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}.items()
        assert not any("hostPath" in volume for volume in template["spec"].get("volumes", []))
        for container in template["spec"]["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
            # What each writes.
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            home = [each["value"] for each in container.get("env", []) if each["name"] == "HOME"]
            own = {"kvtier": ["/var/lib/kvtier"], "vllm": ["/tmp"], "valkey": ["/data"]}.get(container["name"], [])
            assert mounts >= {*home, *own}
    assert hosts["serviceName"] == "hosts"
    assert services["hosts"]["spec"].items() >= {"clusterIP": "None", "publishNotReadyAddresses": True}.items()
    server, engine = hosts["template"]["spec"]["containers"]
    check_host(monkeypatch, server["args"], engine["args"], [each["name"] for each in server["env"]], ("hosts", "valkey"))
    assert {"name": "shm", "mountPath": "/dev/shm"} in server["volumeMounts"] and {"name": "shm", "mountPath": "/dev/shm"} in engine["volumeMounts"]
    assert hosts["template"]["spec"]["terminationGracePeriodSeconds"] > stop_seconds()
    [router] = pods["router"]["spec"]["containers"]
    check_router(router["args"], [f"host-{number}.hosts" for number in range(hosts["replicas"])], flag(engine["args"], "--model")[0])
    assert router["command"][1].endswith(f"/{ROUTER.name}") and "KVTIER_TOKEN" in {each["name"] for each in router["env"]}
    policies = [found["NetworkPolicy"][name]["spec"]["podSelector"] for name in ("inside", "router")]
    assert policies == [{}, {"matchLabels": pods["router"]["metadata"]["labels"]}]
    documents = [each for kind in found.values() for each in kind.values() if each["kind"] != "Namespace"]
    assert {each["metadata"]["namespace"] for each in documents} == {namespace}
