#!/bin/sh
# Checks the dependencies against deny.toml. cargo-deny is taken from the path, or built once into the cache.
# The advisories need the RustSec database from the network: where it cannot be had, that is said and the
# other checks count.
set -eu
cd "$(dirname "$0")/.."

version=0.20.2
cache=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}
deny=$(command -v cargo-deny || true)
if [ -z "$deny" ]; then
    deny=$cache/tools/bin/cargo-deny
    if [ "$("$deny" --version 2>/dev/null)" != "cargo-deny $version" ]; then
        echo "building cargo-deny $version into $cache/tools (some minutes, once)"
        # A directory of its own: the toolchain of today need not suit the artefacts of this project.
        CARGO_TARGET_DIR="$cache/tools/build" cargo install --quiet --locked --force \
            --root "$cache/tools" --version "$version" cargo-deny
        rm -rf "$cache/tools/build"
    fi
fi

"$deny" --locked --workspace check licenses bans sources

if timeout 120 "$deny" --locked --workspace fetch db >/dev/null 2>&1; then
    "$deny" --locked --workspace check --disable-fetch advisories
else
    echo "WARNING: the RustSec advisory database cannot be fetched from here; ADVISORIES WERE NOT CHECKED" >&2
fi
