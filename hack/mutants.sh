#!/bin/sh
# Changes the decisions in src/core one at a time and counts how many changes the tests notice (cargo-mutants).
# src/core needs nothing of the agent but src/types and src/kubeletconfig, so the three are put into a crate of their
# own, which builds in seconds, with their unit tests and tests/core_model.
# usage: hack/mutants.sh [k/n] [cargo mutants' arguments]...   (default 0/16: every sixteenth change; 0/1: all, many hours)
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
mkdir -p "$work/crate/src" "$work/crate/tests"
rm -rf "$work/crate/src/core" "$work/crate/src/types" "$work/crate/src/kubeletconfig" "$work/crate/tests/core_model" "$work/out"
mkdir -p "$work/out"
cp -r src/core src/kubeletconfig src/types "$work/crate/src/"
cp -r tests/core_model "$work/crate/tests/"
cp Cargo.lock "$work/crate/"
cat >"$work/crate/src/lib.rs" <<'LIB'
//! The decisions of holdfast alone.
#![cfg_attr(test, recursion_limit = "256")]
pub mod core;
pub mod kubeletconfig;
pub mod types;
LIB
{
    awk '/^\[package\]/ { on = 1 } /^\[lib\]/ { on = 0 } on && !/^readme/' Cargo.toml
    echo '[lib]'
    echo 'name = "holdfast"'
    echo '[workspace]'
    awk '/^\[dependencies\]/ { on = 1; print; next } /^\[/ { on = 0 }
        on && /^(clap|imbl|jiff|k8s-openapi|nix|procfs|prometheus-client|serde|serde-saphyr|serde_json|sha2|strsim|tempfile|thiserror|tokio) =/' Cargo.toml
    echo '[dev-dependencies]'
    awk '/^\[dev-dependencies\]/ { on = 1; next } /^\[/ { on = 0 } on && /^(insta|proptest) =/' Cargo.toml
    printf '[features]\nfailpoints = []\n[profile.dev]\ndebug = false\n'
} >"$work/crate/Cargo.toml"

status=0
CARGO_TARGET_DIR="$work/target" "$tool" mutants --dir "$work/crate" --output "$work/out" --file 'src/core/**' --exclude '**/tests/**' \
    --exclude '**/tests.rs' --exclude '**/testkit.rs' --shard "$shard" --no-shuffle --sharding round-robin --minimum-test-timeout 60 --colors never "$@" || status=$?
# 0: all caught, 2: some missed, 3: some timed out. Anything else is a failure of the run.
case $status in 0 | 2 | 3) ;; *) exit "$status" ;; esac
found=$work/out/mutants.out
[ -e "$found/missed.txt" ] || exit 0
caught=$(cat "$found/caught.txt" "$found/timeout.txt" | wc -l)
missed=$(wc -l <"$found/missed.txt")
if [ $((caught + missed)) = 0 ]; then
    echo "make mutants: nothing was changed (shard $shard)" >&2
    exit 1
fi
echo "shard $shard: $caught of $((caught + missed)) changes were noticed, $((100 * caught / (caught + missed))) %; missed are in $found/missed.txt"
[ $((caught * 100)) -ge $(((caught + missed) * 90)) ]
