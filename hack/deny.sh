#!/bin/sh
# Checks the dependencies against deny.toml. cargo-deny is taken from the path, or built once into the cache.
# The advisories need the RustSec database from the network: where it cannot be had, that is said and the
# other checks count.
set -eu
cd "$(dirname "$0")/.."

deny=$(command -v cargo-deny || hack/tool.sh cargo-deny 0.20.2)

"$deny" --locked --workspace check licenses bans sources

if timeout 120 "$deny" --locked --workspace fetch db >/dev/null 2>&1; then
    "$deny" --locked --workspace check --disable-fetch advisories
else
    echo "WARNING: the RustSec advisory database cannot be fetched from here; ADVISORIES WERE NOT CHECKED" >&2
fi
