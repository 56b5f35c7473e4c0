#!/bin/sh
# Explores schedules of the simulated node (tests/agent_sim/schedules.rs), one process on each processor.
# usage: hack/sim.sh [SEEDS] [MINUTES] [FROM]   how many seeds, or for how long (3 minutes); the first seed (by the clock)
set -eu
cd "$(dirname "$0")/.."
seeds=${1:-} minutes=${2:-} from=${3:-}

for number in "$seeds" "$minutes" "$from"; do
    case $number in *[!0-9]*)
        echo "make sim: '$number' is no number: make sim SEEDS=1000, or MINUTES=10; FROM=… repeats a run" >&2
        exit 2
        ;;
    esac
done
[ -n "$seeds$minutes" ] || minutes=3
[ -n "$from" ] || from=$(date +%s)000

hack/deps.sh build
# The selection of `make test`, so that nothing is built twice.
HOLDFAST_SIM_SEEDS=$seeds HOLDFAST_SIM_MINUTES=$minutes HOLDFAST_SIM_FROM=$from \
    exec cargo test --workspace --all-features --locked --test agent_sim -- \
    --exact schedules::whatever_the_schedule_the_wanted_pods_run schedules::seeds_that_failed_once_do_so_no_more \
    neighbours::whatever_one_tenant_does_the_others_start_go_and_are_probed_in_time --nocapture
