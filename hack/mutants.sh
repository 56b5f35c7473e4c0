#!/bin/sh
# Changes the decisions in src/core one at a time and counts how many changes the tests notice (cargo-mutants).
# src/core needs nothing of the agent but src/types and src/kubeletconfig, so it is put into a crate of its own, on
# another with those two, which builds in seconds, with its unit tests. What these do not notice is tried again with the
# model of tests/core_model as well.
# usage: hack/mutants.sh [k/n] [cargo mutants' arguments]...   (default 0/16: every sixteenth change; 0/1: all, hours)
# Fails when fewer than 90 of 100 changes are noticed.
set -eu
cd "$(dirname "$0")/.."
hack/deps.sh build

version=27.1.0
cache=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}
tool=$(hack/tool.sh cargo-mutants "$version")
shard=${1:-0/16}
[ $# -eq 0 ] || shift

work=$cache/mutants
crate=$work/crate
rm -rf "$crate" "$work/out"
mkdir -p "$crate/src" "$crate/tests" "$crate/base/src" "$work/out" "$work/tmp"
cp -r src/core "$crate/src/"
cp -r src/kubeletconfig src/types "$crate/base/src/"
cp -r tests/core_model "$crate/tests/"
cp Cargo.lock "$crate/"
cat >"$crate/base/src/lib.rs" <<'LIB'
//! What the decisions stand on.
pub mod kubeletconfig;
pub mod types;
LIB
cat >"$crate/src/lib.rs" <<'LIB'
//! The decisions of holdfast alone.
#![cfg_attr(test, recursion_limit = "256")]
pub mod core;
pub use holdfast_base::{kubeletconfig, types};
LIB

# The lines of [dependencies] (or another table) whose crates some directories use.
uses() {
    table=$1
    shift
    awk -v table="[$table]" '$0 == table { on = 1; next } /^\[/ { on = 0 } on && /^[a-z]/' Cargo.toml |
        while IFS= read -r line; do
            name=$(printf '%s' "${line%%[ .=]*}" | tr - _)
            if grep -rqE "\\b$name(::|!|;)" "$@"; then printf '%s\n' "$line"; fi
        done
}
package() {
    awk '/^\[package\]/ { on = 1 } /^\[lib\]/ { on = 0 } on && !/^readme/' Cargo.toml | sed "s/^name = .*/name = \"$1\"/"
    printf '[features]\nfailpoints = []\n'
}
{
    package holdfast-base
    printf '[dependencies]\n'
    uses dependencies src/kubeletconfig src/types
} >"$crate/base/Cargo.toml"
{
    package holdfast
    printf '[workspace]\nmembers = ["base"]\n[profile.dev]\ndebug = false\n[dependencies]\nholdfast-base.path = "base"\n'
    uses dependencies src/core
    printf '[dev-dependencies]\n'
    uses dev-dependencies src/core tests/core_model
} >"$crate/Cargo.toml"

export CARGO_TARGET_DIR="$work/target" TMPDIR="$work/tmp"
# One change after the other is compiled in the same place, incrementally.
unset CARGO_INCREMENTAL
round() {
    out=$1
    shift
    status=0
    "$tool" mutants --dir "$crate" --output "$work/$out" --in-place --file 'src/core/**' --exclude '**/tests/**' \
        --exclude '**/tests.rs' --exclude '**/*_tests.rs' --exclude '**/testkit.rs' --no-shuffle --colors never "$@" || status=$?
    # 0: all caught, 2: some missed, 3: some timed out. Anything else is a failure of the run.
    case $status in 0 | 2 | 3) ;; *) exit "$status" ;; esac
}
lines() {
    cat "$@" 2>/dev/null | wc -l
}
round out/units --shard "$shard" --sharding round-robin --minimum-test-timeout 60 "$@" -- --lib
found=$work/out/units/mutants.out
caught=$(lines "$found/caught.txt" "$found/timeout.txt")
missed=$(lines "$found/missed.txt")
if [ $((caught + missed)) = 0 ]; then
    echo "make mutants: nothing was changed (shard $shard)" >&2
    exit 1
fi
if [ "$missed" != 0 ]; then
    # By their names, which say place and change.
    sed 's/[][\.*^$+?(){}|/]/\\&/g; s/.*/^&$/' "$found/missed.txt" >"$work/out/again"
    set --
    while IFS= read -r name; do set -- "$@" --re "$name"; done <"$work/out/again"
    round out/model --minimum-test-timeout 300 "$@" -- --test core_model
    found=$work/out/model/mutants.out
    still=$(lines "$found/missed.txt")
    caught=$((caught + missed - still))
    missed=$still
fi
echo "shard $shard: $caught of $((caught + missed)) changes were noticed, $((100 * caught / (caught + missed))) %; missed are in $found/missed.txt"
[ $((caught * 100)) -ge $(((caught + missed) * 90)) ]
