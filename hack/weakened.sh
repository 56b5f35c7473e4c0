#!/bin/bash
# Takes one promise out of the code at a time (tests/weakened/*.patch) and shows that a test notices.
# The promises are those of the store and the decisions, so `types`, `kubeletconfig`, `core`, `store` and the migrations
# are put into a crate of their own, with their unit tests and tests/store_*.rs; it builds in seconds.
# usage: hack/weakened.sh [NAME]...   (default: all)
# Prints a line for each: the test that noticed first, or NOT NOTICED. Fails when one was not noticed, or does not apply.
set -euo pipefail
cd "$(dirname "$0")/.."
hack/deps.sh build

cache=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}
work=$cache/weakened
crate=$work/crate
rm -rf "$crate"
mkdir -p "$crate/src" "$crate/tests" "$work/tmp"
cp -r src/core src/kubeletconfig src/types src/store "$crate/src/"
cp -r migrations "$crate/"
cp -r tests/store_* tests/golden tests/testkit "$crate/tests/"
# Kills processes of the agent.
rm -f "$crate/tests/store_sigkill.rs"
cp Cargo.lock rust-toolchain.toml "$crate/"
{
    # The modules with their comments, as src/lib.rs declares them.
    echo '#![cfg_attr(test, recursion_limit = "256")]'
    for module in core kubeletconfig store types; do echo "pub mod $module;"; done
} >"$crate/src/lib.rs"

# The lines of a table of Cargo.toml whose crates are used.
uses() {
    local table=$1 name
    shift
    awk -v table="[$table]" '$0 == table { on = 1; next } /^\[/ { on = 0 } on && /^[a-z]/' Cargo.toml |
        while IFS= read -r line; do
            name=$(printf '%s' "${line%%[ .=]*}" | tr - _)
            if grep -rqE "\\b$name(::|!|;)" "$@"; then printf '%s\n' "$line"; fi
        done
}
{
    awk '/^\[package\]/ { on = 1 } /^\[lib\]/ { on = 0 } on && !/^readme/' Cargo.toml
    printf '[workspace]\nmembers = ["tests/testkit"]\n[features]\nfailpoints = ["fail/failpoints"]\nfuzzing = []\n'
    printf '[profile.dev]\ndebug = false\n[dependencies]\n'
    uses dependencies "$crate/src" "$crate/migrations" "$crate"/tests/store_*
    printf '[dev-dependencies]\n'
    uses dev-dependencies "$crate/src" "$crate/migrations" "$crate"/tests/store_*
} >"$crate/Cargo.toml"

export CARGO_TARGET_DIR="$work/target" TMPDIR="$work/tmp" CARGO_TERM_COLOR=never
unset CARGO_INCREMENTAL
run() {
    # shellcheck disable=SC2086 # arguments of cargo
    (cd "$crate" && timeout 600 cargo test --offline --no-fail-fast $1) >"$work/log" 2>&1
}
begin=$(date +%s)
for tests in $(sed -n 's/^tests: //p' tests/weakened/*.patch | sort -u | tr ' ' ,); do
    if ! run "${tests//,/ }"; then
        tail -40 "$work/log" >&2
        echo "make weakened: ${tests//,/ } fails before anything is changed" >&2
        exit 1
    fi
done
noticed=0
missed=0
[ $# -gt 0 ] || set -- $(basename -s .patch -a tests/weakened/*.patch)
for name; do
    patch=tests/weakened/$name.patch
    changed=$(sed -n 's,^+++ b/,,p' "$patch")
    if ! git apply --check -C1 "$patch" || ! patch --quiet -p1 -d "$crate" <"$patch" >/dev/null; then
        echo "make weakened: $patch does not apply" >&2
        exit 1
    fi
    if run "$(sed -n 's/^tests: //p' "$patch")"; then
        echo "$name: NOT NOTICED"
        missed=$((missed + 1))
    elif test=$(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$work/log" | head -1) && [ -n "$test" ]; then
        echo "$name: noticed by $test"
        noticed=$((noticed + 1))
    else
        tail -20 "$work/log" >&2
        echo "make weakened: with $patch the tests do not build or do not end" >&2
        exit 1
    fi
    cp "$changed" "$crate/$changed"
done
echo "$noticed of $((noticed + missed)) changes were noticed in $(($(date +%s) - begin)) s"
[ $missed = 0 ]
