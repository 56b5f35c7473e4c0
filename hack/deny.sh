#!/bin/sh
# Checks the dependencies against deny.toml. cargo-deny is taken from the path, or built once into the cache.
# Licences, bans and sources depend on this tree alone, and a violation fails. Advisories and yanked crates change from day to day
# without it: they are reported in lines that begin with "WARNING: ", which the gate repeats at its end. They need the RustSec database
# from the network. `hack/deny.sh tools` only provides the program.
set -eu
cd "$(dirname "$0")/.."

deny=$(command -v cargo-deny || hack/tool.sh cargo-deny 0.20.2)
[ "${1-}" != tools ] || exit 0

"$deny" --locked --workspace check licenses bans sources

if ! timeout --kill-after=5 20 "$deny" --locked --workspace fetch db >/dev/null 2>&1; then
    echo "WARNING: the RustSec advisory database cannot be fetched within 20 s; ADVISORIES WERE NOT CHECKED"
    exit 0
fi
found=$(mktemp)
trap 'rm -f "$found"' EXIT
"$deny" --locked --workspace check --disable-fetch advisories >"$found" 2>&1 || {
    cat "$found"
    sed -n 's/^error\(\[[^]]*\]\): /WARNING: advisory\1: /p' "$found"
    echo "WARNING: dependencies have advisories or were yanked (see above): update them in a change of their own"
}
