#!/usr/bin/env bash
# Installs the Debian and Ubuntu packages that building and testing need: the one list of them. Does nothing when
# all are there. Asks for sudo only when something is missing and the user is not root.
set -euo pipefail

packages=(
  g++ cmake ninja-build pkg-config ccache git
  libhts-dev libzstd-dev libyaml-cpp-dev nlohmann-json3-dev libcli11-dev libfmt-dev zlib1g-dev
  libopenmpi-dev openmpi-bin
  libgtest-dev libgmock-dev clang-format-14
)

usage() {
  echo "usage: scripts/install_dependencies.sh [--list | --help]"
  echo "Installs with apt what building and testing need; --list prints the packages and installs nothing."
}

case "${1:-}" in
  --help | -h) usage; exit 0 ;;
  --list) printf '%s\n' "${packages[@]}"; exit 0 ;;
  "") ;;
  *) usage >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "error: no apt here: install the like of these by hand, then run the command again with" \
       "BIOMOE_SKIP_INSTALL=1: ${packages[*]}" >&2
  exit 1
fi

missing=()
for package in "${packages[@]}"; do
  if [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)" != installed ]]; then
    missing+=("$package")
  fi
done
if ((${#missing[@]} == 0)); then
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "error: packages are missing and there is no sudo: as root, run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi

log="$(mktemp)"
trap 'rm -f "$log"' EXIT
echo "installing: ${missing[*]}"
if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -q >"$log" 2>&1 ||
   ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
       "${missing[@]}" >>"$log" 2>&1; then
  reason="$(grep -m1 '^E:' "$log" || tail -n1 "$log")"
  echo "error: could not install ${missing[*]} (${reason}): is there a network? Connect, or install these packages" \
       "from a mirror, then run the command again" >&2
  exit 1
fi
