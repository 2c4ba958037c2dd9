#!/usr/bin/env bash
# Make kvcopy.ptx from kvcopy.cu, or check that it is what kvcopy.cu gives.
#
#   build.sh         writes kvcopy.ptx
#   build.sh check   hash, text, and that every GPU generation assembles it without spilling registers
#
# Needs Linux on x86-64, Python with pip and no CUDA toolkit: NVRTC and ptxas come from the package registry, into
# $KVTIER_PTX_HOME (default ~/.cache/kvtier-ptx, 290 MiB). Exit status 3 if they are unavailable.
set -euo pipefail
cd "$(dirname "$0")"
version=13.5.37
home=${KVTIER_PTX_HOME:-$HOME/.cache/kvtier-ptx}/$version
# Turing to Blackwell. PTX is written for the oldest; drivers translate it for their GPU.
generations="75 80 86 89 90 100 103 120"

get_tools() {
  [ -e "$home/.complete" ] && return
  command -v python3 >/dev/null || { echo "build.sh: no python3" >&2; return 3; }
  # One at a time; the second finds the work done.
  mkdir -p "$home"
  exec 9>"$home/.lock"
  flock 9
  [ -e "$home/.complete" ] && return
  # For Linux on x86-64.
  python3 -m pip install --disable-pip-version-check --root-user-action=ignore --quiet --no-deps \
    --only-binary :all: --upgrade --target "$home" --require-hashes -r /dev/stdin <<PACKAGES || { echo "build.sh: pip cannot get NVRTC and ptxas $version" >&2; return 3; }
nvidia-cuda-nvrtc==$version --hash=sha256:86b4d68058807988b7d9af5b44917a0601e9c337f35ccd657bfb3c759ff8d8bc
nvidia-cuda-nvcc==$version --hash=sha256:f5c4f7ead5d964fb4af42bbf1e6d3ec3c1e6e9d83b53749f691d387e7fcaa3a7
PACKAGES
  touch "$home/.complete"
}

source_hash() { sha256sum kvcopy.cu | cut -d' ' -f1; }

# The PTX of kvcopy.cu. NVRTC names its own, newest PTX version, which drivers older than it refuse;
# nothing in this source needs more than 6.4, which drivers from 418 on read.
make_ptx() {
  echo "// sha256 of kvcopy.cu: $(source_hash)"
  python3 - "$home/nvidia/cu13/lib/libnvrtc.so.13" <<'PYTHON'
import ctypes, re, sys

nvrtc = ctypes.CDLL(sys.argv[1])
program, size = ctypes.c_void_p(), ctypes.c_size_t()

def text(size_of, get):
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.value.decode()

with open("kvcopy.cu", "rb") as source:
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read(), b"kvcopy.cu", 0, None, None)
options = [b"--gpu-architecture=compute_75", b"--std=c++17"]
status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
sys.stderr.write(text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog))
if status != 0:
    sys.exit(f"build.sh: NVRTC refuses kvcopy.cu ({status})")
ptx, changed = re.subn(r"(?m)^\.version .*$", ".version 6.4", text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX))
if changed != 1:
    sys.exit("build.sh: NVRTC wrote no .version line")
print(ptx, end="")
PYTHON
}

check() {
  local failed=0 fresh generation report registers
  if [ "$(head -1 kvcopy.ptx)" != "// sha256 of kvcopy.cu: $(source_hash)" ]; then
    echo "FAIL kvcopy.ptx was made of another kvcopy.cu; run build.sh"
    return 1
  fi
  get_tools || return
  fresh=$(mktemp)
  make_ptx >"$fresh"
  if cmp "$fresh" kvcopy.ptx; then
    echo "PASS kvcopy.ptx is what NVRTC $version makes of kvcopy.cu"
  else
    echo "FAIL kvcopy.ptx is not what NVRTC $version makes of kvcopy.cu; run build.sh"
    failed=1
  fi
  rm -f "$fresh"
  for generation in $generations; do
    if report=$("$home/nvidia/cu13/bin/ptxas" -v -arch="sm_$generation" kvcopy.ptx -o /dev/null 2>&1) &&
      [ "$(grep -c ' 0 bytes spill stores, 0 bytes spill loads' <<<"$report")" = 5 ]; then
      registers=$(grep -oE 'Used [0-9]+' <<<"$report" | cut -d' ' -f2 | sort -n | paste -sd' ')
      echo "PASS sm_$generation: $registers registers, none spilled"
    else
      echo "FAIL sm_$generation"
      echo "$report"
      failed=1
    fi
  done
  return $failed
}

case ${1:-build} in
  build)
    get_tools
    make_ptx >kvcopy.ptx.new
    mv kvcopy.ptx.new kvcopy.ptx
    ;;
  check) check ;;
  *)
    echo "usage: build.sh [check]" >&2
    exit 2
    ;;
esac
