#!/bin/bash
# Runs `make demo` and the preparation of `make vmtest` again and again beside one busy loop for each processor, to find what fails
# on a slow machine only. The preparation is all that comes before a scenario's own steps: the machine is made anew, the package is
# built and installed, and the shortest scenario runs.
# usage: hack/soak.sh [TIMES [demo|machine]...]   how often (10), and what of the two (both)
# Nothing is tried again: what fails once counts as failed. Outputs are kept in $HOLDFAST_CACHE/soak.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
times=${1:-10}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- demo machine
case $times in '' | *[!0-9]*) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac
export HOLDFAST_CACHE=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$HOLDFAST_CACHE/ci-target}
out=$HOLDFAST_CACHE/soak
rm -rf "$out"
mkdir -p "$out"

# Built before the load begins: how long a compiler takes is not what is tried here.
cargo build --workspace --all-features --locked --bins --tests || exit 1
export HOLDFAST_MACHINE_BINARY=$CARGO_TARGET_DIR/debug/holdfast

loops=()
for _ in $(seq "$(nproc)"); do
    sh -c 'while :; do :; done' &
    loops+=($!)
done
trap 'kill "${loops[@]}" 2>/dev/null' EXIT

passed=0 failed=0
for what; do
    for n in $(seq "$times"); do
        begin=$SECONDS
        case $what in
        demo) make --no-print-directory demo >"$out/$what-$n.log" 2>&1 </dev/null ;;
        machine)
            rm -rf "$HOLDFAST_CACHE/machine"
            make --no-print-directory vmtest NAME=an_archive_that_is_damaged >"$out/$what-$n.log" 2>&1 </dev/null
            ;;
        *) echo "hack/soak.sh: '$what' is neither demo nor machine" >&2; exit 2 ;;
        esac
        status=$?
        if [ $status = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
        echo "$what $n: exit status $status after $((SECONDS - begin)) s"
        [ $status = 0 ] || tail -n 20 "$out/$what-$n.log"
    done
done
printf '\n%s passed, %s failed, 0 skipped\n' $passed $failed
[ $failed = 0 ]
