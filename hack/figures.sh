#!/bin/sh
# Prints what pods of an API server cost: the test that measures it, with the release binary.
set -eu
cd "$(dirname "$0")/.."
hack/deps.sh
HOLDFAST_ENVTEST=$(hack/envtest.sh | tail -n 1)
export HOLDFAST_ENVTEST
cargo build --release --locked
# As the unit starts it.
export "$(sed -n 's/^Environment=\(MALLOC_ARENA_MAX=[^ ]*\) .*/\1/p' contrib/systemd/holdfast.service)"
export "$(sed -n 's/^Environment=.* \(MALLOC_TRIM_THRESHOLD_=[^ ]*\)$/\1/p' contrib/systemd/holdfast.service)"
target=$(cargo metadata --format-version 1 --no-deps --offline | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
HOLDFAST_BIN=$target/release/holdfast HOLDFAST_FIGURES=${HOLDFAST_FIGURES:-100} cargo test --locked --all-features --test cluster figures -- --nocapture --test-threads=1
