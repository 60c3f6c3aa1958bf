#!/usr/bin/env bash
# Compiles the kernels for an AMD GPU (gfx90a), to object files that nothing runs: there is no such GPU here.
# Says so and succeeds where there is no hipcc. In CI, as root, it first tries to install Debian's.
set -euo pipefail
cd "$(dirname "$0")/.."
export HIP_PLATFORM=amd

if ! command -v hipcc >/dev/null && [ -n "${CI:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    install="apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends hipcc"
    timeout 180 bash -c "$install" >/dev/null 2>&1 || true
fi
if ! command -v hipcc >/dev/null; then
    echo "skipped: no hipcc (Debian has it: apt-get install hipcc)"
    exit 0
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
compile() {
    hipcc -O1 -std=c++17 --offload-arch=gfx90a -fPIC -Ikernels/include -x hip -c "$1" -o "$out/$(basename "$1").o"
    echo "compiled for gfx90a, not run: $1"
}
export -f compile
export out
printf '%s\0' kernels/csrc/*.cu kernels/csrc/lora/*.cu | xargs -0 -n 1 -P "$(nproc)" bash -euc 'compile "$0"'
