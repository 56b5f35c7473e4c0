#!/bin/sh
# Feeds the fuzz targets (src/fuzzing.rs) with inputs that libFuzzer makes up by coverage.
# usage: hack/fuzz.sh [MINUTES] [EXECUTIONS] [NAME...]   for how long each (1 minute), or how many inputs; all of them
#        hack/fuzz.sh minimise [NAME...]                 takes what earlier runs found into fuzz/corpus
# A run begins with the inputs in fuzz/corpus and with those that earlier runs found, which are kept in the cache.
set -eu
cd "$(dirname "$0")/.."
minutes=${1:-} executions=
[ $# -eq 0 ] || shift
if [ "$minutes" != minimise ]; then
    executions=${1:-}
    [ $# -eq 0 ] || shift
    for number in "$minutes" "$executions"; do
        case $number in *[!0-9]*)
            echo "make fuzz: '$number' is no number: make fuzz MINUTES=10, or EXECUTIONS=10000000" >&2
            exit 2
            ;;
        esac
    done
    [ -n "$minutes$executions" ] || minutes=1
fi
all=$(cd fuzz/src/bin && for file in *.rs; do echo "${file%.rs}"; done)
names=${*:-$all}
for name in $names; do
    if [ ! -e "fuzz/src/bin/$name.rs" ]; then
        echo "make fuzz: there is no target '$name'; there are:" $all >&2
        exit 2
    fi
done

hack/deps.sh build fuzz
host=$(rustc -vV | sed -n 's/^host: //p')
target=${CARGO_TARGET_DIR:-target}/fuzz
finds=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/holdfast}/fuzz
mkdir -p "$target"
# What `cargo fuzz` gives to rustc, without a sanitizer and what only nightly takes. --target keeps it off build scripts.
RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares" \
    CARGO_TARGET_DIR=$target cargo build --manifest-path fuzz/Cargo.toml --release --locked --target "$host" \
    $(for name in $names; do echo --bin "$name"; done)
programs=$target/$host/release
# Files of targets are in memory where that is possible.
[ ! -w /dev/shm ] || export TMPDIR=/dev/shm

# run NAME OPTION... DIRECTORY...: options that every run has.
run() {
    name=$1
    shift
    [ ! -e "fuzz/dict/$name" ] || set -- "-dict=fuzz/dict/$name" "$@"
    "$programs/$name" -max_len=4096 -timeout=10 -rss_limit_mb=1024 "$@"
}

if [ "$minutes" = minimise ]; then
    for name in $names; do
        mkdir -p "$finds/$name"
        new=$(mktemp -d)
        run "$name" -merge=1 "$new" "fuzz/corpus/$name" "$finds/$name" 2>"$target/$name.log" || {
            tail -n 20 "$target/$name.log" >&2
            exit 1
        }
        # Small ones first, and not so many that nobody looks at them.
        find "$new" -type f -size -4097c -printf '%s %f\n' | sort -n | head -n 200 | while read -r _ file; do
            [ -e "fuzz/corpus/$name/$file" ] || cp "$new/$file" "fuzz/corpus/$name/$file"
        done
        rm -r "$new"
        echo "$name: $(ls "fuzz/corpus/$name" | wc -l) inputs"
    done
    exit
fi

failed=
printf '%-20s %12s %9s %8s %11s\n' target executions exec/s RSS/MiB slowest/us
for name in $names; do
    mkdir -p "$finds/$name" "$target/crashes"
    log=$target/$name.log
    set -- -print_final_stats=1 "-artifact_prefix=$target/crashes/$name-"
    if [ -n "$executions" ]; then
        set -- "$@" "-runs=$executions"
    else
        set -- "$@" "-max_total_time=$((minutes * 60))"
    fi
    result=0
    run "$name" "$@" "$finds/$name" "fuzz/corpus/$name" >"$log" 2>&1 || result=$?
    stat() { sed -n "s/^stat::$1: *//p" "$log" | tail -n 1; }
    slowest=$(sed -n 's/^slowest input: \([0-9]*\) us$/\1/p' "$log" | tail -n 1)
    printf '%-20s %12s %9s %8s %11s\n' "$name" "$(stat number_of_executed_units)" "$(stat average_exec_per_sec)" \
        "$(stat peak_rss_mb)" "${slowest:-<1000}"
    if [ $result -ne 0 ]; then
        failed="$failed $name"
        input=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
        echo "FAILED $name: see $log" >&2
        [ -z "$input" ] || echo "  again: $programs/$name $input" >&2
    fi
done
if [ -n "$failed" ]; then
    echo "make fuzz: these targets failed:$failed" >&2
    exit 1
fi
