"""The wheel, the tarball and the licences: what `deploy/release/build` makes works where nothing else is installed."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from kvrig.server import REPOSITORY, Server

PACKAGES = Path(os.environ.get("CARGO_TARGET_DIR") or REPOSITORY / "target") / "packages"
WAYS = ["command", "module"]


def one(pattern):
    """Returns the only file of this pattern that the stage `package` made."""
    [path] = PACKAGES.glob(pattern)
    return path


class Environment:
    """An environment with the wheel and nothing else, and the way in which its command is started."""

    def __init__(self, directory):
        self.prefix, self.binary = directory, directory / "bin" / "kvtier"
        self.run(sys.executable, "-m", "venv", "--without-pip", directory)
        pip = [sys.executable, "-m", "pip", "--python", directory / "bin" / "python", "--disable-pip-version-check"]
        done = self.run(*pip, "install", "--quiet", "--no-index", one("*.whl"))
        assert done.returncode == 0, done

    def command(self, way):
        """Returns the command line of `kvtier` or `python -m kvtier`."""
        return [str(self.binary)] if way == "command" else [str(self.prefix / "bin" / "python"), "-m", "kvtier"]

    def run(self, *command):
        """Runs a command without the packages of the tests."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment of this module."""
    return Environment(tmp_path_factory.mktemp("wheel") / "venv")


# proves: docs/operate.md#install
def test_wheel_has_package_command_and_documents(environment):
    """Package and command have one version; manual, completions and licences are where systems look for them."""
    code = "import kvtier, kvtier.doctor, sys; print(kvtier.__version__, kvtier.__file__)"
    done = environment.run(environment.prefix / "bin" / "python", "-c", code)
    version, file = done.stdout.split()
    assert Path(file).is_relative_to(environment.prefix), done
    for way in WAYS:
        done = environment.run(*environment.command(way), "version")
        assert done.returncode == 0 and done.stdout.startswith(f"kvtier {version} ("), done
    share = environment.prefix / "share"
    assert "kvtier\\-server" in (share / "man/man1/kvtier-server.1").read_text()
    assert "kvtier__subcmd__server" in (share / "bash-completion/completions/kvtier").read_text()
    assert (share / "zsh/site-functions/_kvtier").read_text().startswith("#compdef kvtier")
    assert "complete -c kvtier" in (share / "fish/vendor_completions.d/kvtier.fish").read_text()
    licences = (share / "doc/kvtier/THIRD-PARTY.txt").read_text()
    assert "\nring 0." in licences and "\npyo3 0." in licences and "BoringSSL" in licences
    assert "\nserde_derive " not in licences, "a macro is not linked"
    assert "The Rust Standard Library" in (share / "doc/kvtier/rust-standard-library.html").read_text()


def test_build_without_the_script_has_the_package_alone():
    """`maturin build` in bindings/python, as pip calls it: nothing of the script is needed, and nothing it left is in the wheel."""
    [wheel] = (PACKAGES.parent / "wheels").glob("*.whl")
    alone, whole = (set(zipfile.ZipFile(each).namelist()) for each in (wheel, one("*.whl")))
    assert "kvtier/__main__.py" in alone and not [name for name in alone if ".data/" in name]
    assert {name for name in whole if ".data/" not in name} == alone


# proves: docs/operate.md#install
@pytest.mark.parametrize("way", WAYS)
def test_installed_server_serves_until_sigterm(environment, tmp_path, way):
    """The process that was started is the server: it answers a ping, and SIGTERM ends it with its own exit status."""
    server = Server([*environment.command(way), "server"], tmp_path / "log", env={"PYTHONPATH": ""})
    server.start()
    try:
        assert Path(f"/proc/{server.process.pid}/exe").samefile(environment.binary)
        ping = environment.run(*environment.command(way), "ping", "--count", "1", f"127.0.0.1:{server.port}")
        assert ping.returncode == 0, ping
        assert server.stop()[0] == 0, server.tail()
        assert not server.unexpected_trouble()
    finally:
        server.kill()


# proves: docs/operate.md#install
@pytest.mark.parametrize("way", WAYS)
def test_arguments_and_exit_status_are_the_command_s(environment, way):
    """Arguments arrive as they are; bad usage is 2, a failure 1."""
    done = environment.run(*environment.command(way), "server", "--port", "a b")
    assert done.returncode == 2 and "a b" in done.stderr, done
    done = environment.run(*environment.command(way), "ping", "--count", "1", "127.0.0.1:1")
    assert done.returncode == 1, done


def test_module_finds_the_command_beside_a_target_folder():
    """`pip install --target`, whose bin/ is in the same folder, as the stage `package` installs it."""
    import kvtier

    folder = Path(kvtier.__file__).parents[1]
    done = subprocess.run([sys.executable, "-m", "kvtier", "version"], capture_output=True, text=True, check=True)
    assert done.stdout == subprocess.run([folder / "bin" / "kvtier", "version"], capture_output=True, text=True).stdout


def test_module_runs_the_command_of_its_own_installation(tmp_path):
    """A command beside the package comes first; one above it counts only from lib/python3.x/site-packages, also through a link."""
    import kvtier

    def place(prefix):
        command = prefix / "bin" / "kvtier"
        command.parent.mkdir()
        command.write_text('#!/bin/sh\necho "$0"')
        command.chmod(0o755)
        return command

    def run(folder):
        environment = dict(os.environ, PYTHONPATH=str(folder))
        done = subprocess.run([sys.executable, "-m", "kvtier"], capture_output=True, text=True, env=environment, check=False)
        return done.stdout.strip()

    target, site, venv = (tmp_path / name for name in ("a/b/c/target", "a/lib/python3.11/site-packages", "venv/lib/python3.11/site-packages"))
    shutil.copytree(Path(kvtier.__file__).parent, target / "kvtier")
    for link in site, venv:
        link.mkdir(parents=True)
        (link / "kvtier").symlink_to(target / "kvtier")
    above, linked = place(tmp_path / "a"), place(tmp_path / "venv")
    assert run(target) == "", "three folders up is another program's"
    assert run(site) == str(above)
    assert run(venv) == str(linked)
    beside = place(site)
    assert run(site) == str(beside)


def test_image_copies_what_the_wheel_installs():
    """The Dockerfile takes command and documents from where `pip install --target` puts them."""
    import kvtier

    folder = Path(kvtier.__file__).parents[1]
    copies = re.findall(r"^COPY --from=build /opt/kvtier/(\S+) ", (REPOSITORY / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    assert copies == ["bin/kvtier", "share"]
    assert all((folder / name).exists() for name in copies)


def test_module_without_command_names_where_it_was_sought(tmp_path):
    """A package that was copied without its command."""
    import kvtier

    shutil.copytree(Path(kvtier.__file__).parent, tmp_path / "site" / "kvtier")
    done = subprocess.run(
        [sys.executable, "-m", "kvtier", "server"], cwd=tmp_path / "site", capture_output=True, text=True,
        env=dict(os.environ, PYTHONPATH=str(tmp_path / "site")), check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "no command at" in done.stderr and f"{tmp_path}/site/bin/kvtier" in done.stderr, done


# proves: docs/operate.md#install
def test_tarball_runs_and_sums_are_right(tmp_path):
    """Binary, documents and unit files are in one folder named after version and target; every file has its sum."""
    sums = dict(reversed(line.split()) for line in (PACKAGES / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == {path.name for path in PACKAGES.iterdir()} - {"SHA256SUMS"}
    for name, expected in sums.items():
        assert hashlib.sha256((PACKAGES / name).read_bytes()).hexdigest() == expected
    archive = one("*.tar.gz")
    with tarfile.open(archive) as tar:
        assert all(member.uid == 0 and not member.mode & 0o022 for member in tar)
        tar.extractall(tmp_path, filter="data")
    folder = tmp_path / archive.name.removesuffix(".tar.gz")
    version = subprocess.run([folder / "bin/kvtier", "version"], capture_output=True, text=True, check=True).stdout
    _, release, rest = version.splitlines()[0].split(maxsplit=2)
    assert folder.name.startswith(f"kvtier-{release}-") and folder.name.endswith(rest.split()[-1].strip("()"))
    for name in ["share/man/man1/kvtier.1", "share/doc/kvtier/LICENSE", "share/doc/kvtier/THIRD-PARTY.txt",
                 "systemd/kvtier.service", "systemd/kvtier.sysusers", "systemd/kvtier.toml"]:  # fmt: skip
        assert (folder / name).is_file(), name


def licenses():
    """Returns the script as a module."""
    loader = SourceFileLoader("licenses", str(REPOSITORY / "deploy/release/licenses"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("licenses", loader))
    loader.exec_module(module)
    return module


def crate(directory, name, **files):
    """Makes a crate; returns it as `cargo metadata` shows it."""
    folder = directory / name
    (folder / "third_party").mkdir(parents=True)
    for file, text in files.items():
        (folder / file.replace("__", "/")).write_text(text)
    return {"name": name, "version": "1.0.0", "license": "MIT", "repository": None, "manifest_path": str(folder / "Cargo.toml")}


# proves: docs/operate.md#install
def test_crate_without_licence_is_refused(tmp_path):
    """Texts of vendored code count, equal ones appear once, and a crate without any ends the release."""
    one, two = crate(tmp_path, "one", LICENSE="text A", third_party__COPYING="text B"), crate(tmp_path, "two", UNLICENSE="text A")
    document = licenses().collect([two, one])
    assert document.count("text A") == document.count("text B") == 1
    assert "one 1.0.0, two 1.0.0\n" in document and document.index("one 1.0.0") < document.index("two 1.0.0")
    with pytest.raises(SystemExit, match="without a licence file: three 1.0.0$"):
        licenses().collect([one, crate(tmp_path, "three", **{"license.rs": "code"})])


def test_build_names_a_missing_tool(tmp_path):
    """Before the long build."""
    for tool in ("bash", "dirname", "realpath", "rustc", "sed", "head", "git", "cargo", "cc", "objcopy", "python3"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    build = [REPOSITORY / "deploy/release/build", "--native"]
    done = subprocess.run(build, capture_output=True, text=True, check=False, env=dict(os.environ, PATH=str(tmp_path)))
    assert done.returncode == 2 and "objdump is not installed" in done.stderr, done


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--native", "x86_64-unknown-linux-gnu"], "no target is allowed"),
        (["--profile", "release"], "only dist is allowed"),
        (["riscv64"], "'riscv64' is neither"),
    ],
)
def test_build_refuses_what_it_cannot_build(arguments, reason):
    """Before anything is built or removed."""
    done = subprocess.run([REPOSITORY / "deploy/release/build", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and reason in done.stderr, done
