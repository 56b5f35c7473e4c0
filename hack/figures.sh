#!/bin/sh
# Prints what pods of an API server cost, then what one hostile tenant costs the others: the tests that measure it, with the
# release binary. HOLDFAST_FIGURES has numbers of pods, HOLDFAST_FAIRNESS tenants (tests/cluster/tenants.rs); empty
# leaves one of the two out. Last it draws a restart with HOLDFAST_PICTURES_PODS pods (20) into docs/pictures; 0 leaves that out.
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
export HOLDFAST_BIN="$target/release/holdfast"
measure() {
    cargo test --locked --all-features --test cluster "$@" --nocapture --test-threads=1
}
status=0
HOLDFAST_FIGURES=${HOLDFAST_FIGURES-100} HOLDFAST_FAIRNESS=${HOLDFAST_FAIRNESS-all}
export HOLDFAST_FIGURES HOLDFAST_FAIRNESS
[ -z "$HOLDFAST_FIGURES" ] || measure figures -- --skip fairness:: || status=$?
[ -z "$HOLDFAST_FAIRNESS" ] || measure fairness:: -- || status=$?
HOLDFAST_PICTURES_PODS=${HOLDFAST_PICTURES_PODS:-20}
export HOLDFAST_PICTURES_PODS
if [ "$HOLDFAST_PICTURES_PODS" != 0 ]; then
    HOLDFAST_PICTURES="$PWD/docs/pictures" cargo test --locked --all-features --test agent_real pictures:: -- --nocapture ||
        status=$?
fi
exit $status
