#!/usr/bin/env bash
# Make the Python environment and the models that the end-to-end tests use. Does nothing when all are there.
#
#   tests/setup.sh
#   tests/setup.sh --newest lmcache   the newest release or pre-release of a package, without what it depends on; prints its folder
#   tests/setup.sh vllm-0.27.0   an earlier vLLM too (0.4 GiB; before 0.27 its PyTorch, too: 1.2 or 4.1 GiB); prints its folder
#
# They live in $KVTIER_E2E_HOME (default ~/.cache/kvtier-e2e): venv/ (6.4 GiB: vLLM for CPU, LMCache, torch),
# model/ (a tiny random Llama), model-mla/ (a DeepSeek-V2), clients/ (earlier LMCache and pyzmq releases, Valkey, NIXL, Mooncake and SGLang, 1.1 GiB)
# and tools/ (Prometheus on a Debian). As root on a Debian it also installs chromium. First run: about 3 minutes and 4 GB of downloads. Needs Python 3.11 with venv.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
home=${KVTIER_E2E_HOME:-$HOME/.cache/kvtier-e2e}
venv=$home/venv model=$home/model
mkdir -p "$home"

# One set-up at a time; the second finds the work done.
exec 9>"$home/.setup.lock"
flock 9

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 /usr/bin/python3.11; do
    if "$candidate" -c 'import sys, venv, ensurepip; assert sys.version_info[:2] == (3, 11)' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

fingerprint() { cat "$@" | sha256sum | cut -d' ' -f1; }

install_packages() {
  local python attempt pause=10
  if ! python=$(find_python); then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      apt-get update -qq && apt-get install -y -qq python3.11 python3.11-venv
    fi
    python=$(find_python) || { echo "tests/setup.sh: needs Python 3.11 with the venv module (set PYTHON)" >&2; exit 1; }
  fi
  rm -f "$venv/.stamp"
  "$venv/bin/python" -c 'import sys; assert sys.version_info[:2] == (3, 11)' 2>/dev/null || { rm -rf "$venv"; "$python" -m venv "$venv"; }
  for attempt in 1 2 3 4 5; do
    if "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --retries 10 --timeout 60 \
      -r "$here/requirements.lock"; then
      break
    fi
    [ "$attempt" = 5 ] && { echo "tests/setup.sh: the package registry failed five times" >&2; exit 1; }
    echo "tests/setup.sh: attempt $attempt failed, again in $pause s" >&2
    sleep "$pause"
    pause=$((pause * 2))
  done
  # What the tests import must load, and vLLM must have picked its CPU platform.
  (cd / && LMCACHE_LOG_LEVEL=ERROR "$venv/bin/python" - <<'PY')
import lmcache.integration.vllm.lmcache_mp_connector, pytest
from vllm.platforms import current_platform
assert current_platform.device_type == "cpu", current_platform
PY
  fingerprint "$here/requirements.lock" >"$venv/.stamp"
}

# Each line of clients.lock into a folder: RELEASE of LMCache, PACKAGE-RELEASE of others. Other folders are removed: like
# the environment, they belong to one state of the locks. Checkouts of several states need a $KVTIER_E2E_HOME each.
unpack_clients() {
  local line release part folder listed
  mkdir -p "$home/clients"
  listed=$(sed -n 's/^\([a-z0-9-]*\)==\([^ ]*\) .*/\1-\2/p' "$here/clients.lock" | sed 's/^lmcache-//')
  for folder in "$home"/clients/*; do
    grep -qxF "${folder##*/}" <<<"$listed" || rm -rf "$folder"
  done
  grep '^[a-z0-9-]*==' "$here/clients.lock" | while read -r line; do
    release=${line%% *} release=${release/==/-} release=${release#lmcache-}
    part=$home/clients/.part-$release
    [ -d "$home/clients/$release" ] && continue
    rm -rf "$part"
    mkdir -p "$part"
    echo "$line" >"$part/requirement"
    "$venv/bin/python" -m pip download --disable-pip-version-check --quiet --no-deps --require-hashes --only-binary :all: \
      --retries 10 --timeout 60 --dest "$part" -r "$part/requirement" </dev/null
    "$venv/bin/python" -m zipfile -e "$part"/*.whl "$part/wheel"
    mv "$part/wheel" "$home/clients/$release"
    rm -rf "$part"
  done
  fingerprint "$here/clients.lock" >"$home/clients/.stamp"
}

# Debian's Prometheus, unpacked: one that is installed starts a server of its own. Without it tests skip themselves.
unpack_prometheus() {
  local folder=$home/tools/prometheus part=$home/tools/.part-prometheus
  rm -rf "$part"
  mkdir -p "$part/tree"
  (
    cd "$part"
    apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; }
    dpkg -x prometheus_*.deb tree
  ) && mv "$part/tree" "$folder"
  rm -rf "$part"
}

# Debian's Chromium, for the tests of the dashboard; it needs libraries of the system. Without it they skip themselves.
install_chromium() {
  [ "$(id -u)" = 0 ] || return 1
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1 ||
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; }
}

# An earlier vLLM, of the lock beside it, for stages that ask for it by name; prints its folder. A lock that it names with `-r` has a
# folder of its own, which it links to.
unpack_vllm() {
  local folder=$home/pairs/$1 lock=$here/vllm/$1.lock part=$home/pairs/$1.part wheel shared each
  if [ ! -d "$folder" ]; then
    rm -rf "$part"
    mkdir -p "$part/wheel"
    grep -v '^-r ' "$lock" >"$part/requirements"
    "$venv/bin/python" -m pip download --disable-pip-version-check --quiet --no-deps --require-hashes --only-binary :all: \
      --retries 10 --timeout 60 --dest "$part" -r "$part/requirements" </dev/null >&2
    for wheel in "$part"/*.whl; do
      "$venv/bin/python" -m zipfile -e "$wheel" "$part/wheel"
    done
    # Engines write none themselves, and each start would compile it.
    "$venv/bin/python" -m compileall -q -j 2 "$part/wheel" >/dev/null || true
    for shared in $(sed -n 's/^-r \(.*\)\.lock$/\1/p' "$lock"); do
      unpack_vllm "$shared" >/dev/null
      for each in "$home/pairs/$shared"/*; do
        ln -s "../$shared/${each##*/}" "$part/wheel"
      done
    done
    mv "$part/wheel" "$folder"
    rm -rf "$part"
  fi
  echo "$folder"
}

# The newest release of a package, pre-releases too; prints its folder. It runs with the dependencies of the environment.
unpack_newest() {
  local part=$home/newest/.part-$1 folder
  rm -rf "$part"
  mkdir -p "$part"
  "$venv/bin/python" -m pip download --disable-pip-version-check --quiet --no-deps --pre --only-binary :all: --retries 10 --timeout 60 \
    --dest "$part" "$1" </dev/null >&2
  folder=$(echo "$part"/*.whl)
  folder=$home/newest/$1-$(cut -d- -f2 <<<"${folder##*/}")
  [ -d "$folder" ] || { "$venv/bin/python" -m zipfile -e "$part"/*.whl "$part/wheel" && mv "$part/wheel" "$folder"; }
  rm -rf "$part"
  echo "$folder"
}

if [ "${1:-}" = --newest ]; then
  unpack_newest "$2"
  exit
fi
if [ $# -gt 0 ]; then
  unpack_vllm "$1"
  exit
fi
began=$SECONDS
if [ "$(cat "$venv/.stamp" 2>/dev/null)" != "$(fingerprint "$here/requirements.lock")" ]; then
  echo "tests/setup.sh: installing Python packages into $venv"
  install_packages
fi
if [ "$(cat "$home/clients/.stamp" 2>/dev/null)" != "$(fingerprint "$here/clients.lock")" ]; then
  echo "tests/setup.sh: unpacking earlier releases of LMCache and pyzmq, Valkey and its client, NIXL, Mooncake and SGLang into $home/clients"
  unpack_clients
fi
if [ ! -x "$home/tools/prometheus/usr/bin/prometheus" ] && command -v apt-get dpkg >/dev/null; then
  echo "tests/setup.sh: unpacking Prometheus into $home/tools"
  unpack_prometheus || echo "tests/setup.sh: no package prometheus was found: its tests will be skipped" >&2
fi
if [ -z "${KVTIER_CHROMIUM:-}" ] && ! command -v chromium >/dev/null && command -v apt-get >/dev/null; then
  echo "tests/setup.sh: installing Chromium"
  install_chromium || echo "tests/setup.sh: Chromium cannot be installed: the tests of the dashboard will be skipped" >&2
fi
for kind in "" -mla -one-head; do
  if [ "$(cat "$model$kind/.stamp" 2>/dev/null)" != "$(fingerprint "$here/vllm/make_model.py")" ]; then
    echo "tests/setup.sh: making the model in $model$kind"
    rm -rf "$model$kind"
    case $kind in
      -mla) flags=(--mla) ;;
      -one-head) flags=(--kv-heads 1) ;;
      *) flags=() ;;
    esac
    "$venv/bin/python" "$here/vllm/make_model.py" --out "$model$kind" "${flags[@]}"
    fingerprint "$here/vllm/make_model.py" >"$model$kind/.stamp"
  fi
done
# Tinier ones, of every kind that tests/trust compares.
models=$home/models-trust
if [ "$(cat "$models/.stamp" 2>/dev/null)" != "$(fingerprint "$here/trust/models.py")" ]; then
  echo "tests/setup.sh: making the models in $models"
  rm -rf "$models"
  "$venv/bin/python" "$here/trust/models.py" --out "$models"
  fingerprint "$here/trust/models.py" >"$models/.stamp"
fi
echo "tests/setup.sh: ready in $((SECONDS - began)) s ($home)"
