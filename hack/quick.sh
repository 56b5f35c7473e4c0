#!/bin/sh
# Runs what is pure and simulated: the tests of the group `pure` (.config/nextest.toml). Needs neither root nor a runtime.
set -eu
cd "$(dirname "$0")/.."

hack/deps.sh build
PATH=$(hack/nextest.sh):$PATH
export PATH
# Only the files whose tests are pure: the others need not be linked.
files='agent_sim api_source core_model docs kubeletconfig layers pod_fields sources store_contract'
set -- --lib --bin test-runner "$@"
for file in $files; do
    set -- "$@" --test "$file"
done
# Of the points at which something may fail, and of random cases, one in seven: whole runs try all. Odd, since power is lost at
# every other point.
export HOLDFAST_TEST_STRIDE="${HOLDFAST_TEST_STRIDE:-7}"
# The same selection of packages and features as nextest's, which then builds all the tests side by side.
cargo build --workspace --all-features --locked --bin test-runner
target=$(cargo metadata --format-version 1 --no-deps --offline | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
exec "$target/debug/test-runner" run --no-cluster "$@"
