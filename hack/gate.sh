#!/bin/bash
# The gate: what a change has to pass. `make gate` runs it, and .ci/run does.
#
#   hack/gate.sh           packages, tools, `make check`, `make docs`, all test binaries, `make demo`, `make sim`, `make vmtest`, `make test`
#   FAST=1 hack/gate.sh    packages, `make check`, `make docs`, all test binaries, `make quick`, `make demo`: ten minutes with warm caches
#   FRESH=1                on a clone of HEAD in $HOLDFAST_CACHE/checkout instead of on this directory. It is always the same
#                          directory, so that cargo builds again only what has changed.
#
# Needs root on Debian with Rust, and installs the rest. What is expensive to build is kept in HOLDFAST_CACHE; all of it may be
# missing. Each phase has a limit, plus what the phases before it did not use: all together below 80 minutes. A phase that fails ends
# the gate: its last lines are printed again, then a paragraph that names the cause, then one line that counts tests. In that
# line a phase that failed without a failed test counts as one. A commit that passes is added to $HOLDFAST_CACHE/gated: commit,
# form, seconds.
set -uo pipefail
top=$(cd "$(dirname "$0")/.." && pwd -P)
cd "$top" || exit 1

export HOLDFAST_CACHE=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$HOLDFAST_CACHE/ci-target}
export CARGO_TERM_COLOR=never DEBIAN_FRONTEND=noninteractive RUST_BACKTRACE=1
# A make that calls us hands its own flags down.
unset MAKEFLAGS MFLAGS MAKELEVEL
form=full
[ "${FAST:-}" != 1 ] || form=fast
fresh=${FRESH:-}
unset FAST FRESH
checkout=$HOLDFAST_CACHE/checkout
logs=$HOLDFAST_CACHE/gate-logs
began=${HOLDFAST_GATE_BEGAN:-$(date +%s)}

fail() {
    echo "gate: $*" >&2
    printf '\n0 passed, 1 failed, 0 skipped\n'
    exit 1
}

# shellcheck source=hack/lock.sh
. hack/lock.sh

# --- before the phases ---------------------------------------------------------------------------------------

# Processes that another gate with these caches has started. We hold the lock, so that gate is dead.
left_processes() {
    grep -lzF -- "HOLDFAST_GATE=$HOLDFAST_CACHE:" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 | while read -r pid; do
        gate=$({ tr '\0' '\n' <"/proc/$pid/environ"; } 2>/dev/null | sed -n 's/^HOLDFAST_GATE=.*:\([0-9]*\)$/\1/p')
        [ -z "$gate" ] || [ "$gate" = $$ ] || echo "$pid"
    done
}

# Ends what a gate that was killed has left running, and removes what that has made.
end_killed_gate() {
    local pids pid name
    pids=$(left_processes)
    [ -n "$pids" ] || return 0
    echo "gate: ending $(echo "$pids" | wc -l) processes that a killed gate has left"
    # Runtimes last: they are needed to end their containers.
    for pid in $pids; do
        name=$(cat "/proc/$pid/comm" 2>/dev/null) || continue
        case $name in containerd*) ;; *) kill -9 "$pid" 2>/dev/null || true ;; esac
    done
    if [ -x "$CARGO_TARGET_DIR/debug/test-runner" ]; then
        timeout 40 "$CARGO_TARGET_DIR/debug/test-runner" sweep 9>&- || echo "gate: the sweep ended with status $?"
    fi
    if [ -x "$checkout/hack/demo.sh" ]; then
        timeout 40 "$checkout/hack/demo.sh" stop 9>&- || echo "gate: the demo's end ended with status $?"
    fi
    for pid in $(left_processes); do
        kill -9 "$pid" 2>/dev/null || true
    done
}

free_mib() { df -Pk "$1" | awk 'NR == 2 { print int($4 / 1024) }'; }

# Clears caches in a fixed order until the disk has room: what is rebuilt soonest goes first.
make_room() {
    local wanted=25000 what path size
    [ $form = full ] || wanted=12000
    # For its own tests.
    wanted=${HOLDFAST_GATE_ROOM:-$wanted}
    size=$(du -sm "$CARGO_TARGET_DIR" | cut -f1)
    if [ "$size" -gt 40000 ]; then
        echo "gate: $CARGO_TARGET_DIR has grown to $size MiB; it is cleared"
        rm -rf "$CARGO_TARGET_DIR"
    fi
    while IFS='|' read -r what path; do
        [ "$(free_mib "$HOLDFAST_CACHE")" -lt $wanted ] || return 0
        [ -e "$path" ] || continue
        echo "gate: $(free_mib "$HOLDFAST_CACHE") MiB are free, $wanted are needed; clearing $what in $path"
        rm -rf "$path"
    done <<END
logs of the last gate|$logs
outputs of failed tests|$checkout/target/nextest
incremental compilation|$CARGO_TARGET_DIR/debug/incremental
builds of fuzz targets|$HOLDFAST_CACHE/fuzz-target
the test machine|$HOLDFAST_CACHE/machine
all builds|$CARGO_TARGET_DIR
END
    [ "$(free_mib "$HOLDFAST_CACHE")" -ge $wanted ] ||
        fail "the disk of $HOLDFAST_CACHE has $(free_mib "$HOLDFAST_CACHE") MiB free and the $form gate needs $wanted." \
            "All its caches are cleared already: make room, or set HOLDFAST_CACHE to a directory on another disk"
}

# A clone of HEAD in the same directory each time: files that did not change keep their times.
clone() {
    local commit
    commit=$(git rev-parse HEAD) || fail "$top is no checkout of git"
    [ -z "$(git status --porcelain)" ] || echo "gate: uncommitted changes in $top are not part of what is checked"
    if cut -d' ' -f5 /proc/self/mountinfo | grep -qaF -- "$checkout/"; then
        timeout 60 "$checkout/hack/demo.sh" stop 9>&- || true
        cut -d' ' -f5 /proc/self/mountinfo | grep -aF -- "$checkout/" >&2 &&
            fail "the file systems above are mounted below $checkout: unmount them"
    fi
    if ! { git -C "$checkout" fetch --quiet --no-tags --force --update-shallow "$top" HEAD &&
        git -C "$checkout" checkout --quiet --force --detach "$commit" &&
        git -C "$checkout" clean -ffdxq; } 2>/dev/null; then
        rm -rf "$checkout"
        git clone --quiet --no-hardlinks "$top" "$checkout" 9>&- &&
            git -C "$checkout" checkout --quiet --force --detach "$commit" || fail "$top cannot be cloned to $checkout"
    fi
}

if [ "${HOLDFAST_GATE_INSIDE:-}" != 1 ]; then
    mkdir -p "$HOLDFAST_CACHE" || fail "$HOLDFAST_CACHE cannot be made: set HOLDFAST_CACHE to a directory that can be written"
    command -v flock >/dev/null || fail "flock is missing: install util-linux"
    hold "$HOLDFAST_CACHE/gate.lock" "the gate that uses $HOLDFAST_CACHE" 4800
    mkdir -p "$CARGO_TARGET_DIR" || fail "$CARGO_TARGET_DIR cannot be made"
    end_killed_gate
    make_room
    mkdir -p "$CARGO_TARGET_DIR"
    export HOLDFAST_GATE=$HOLDFAST_CACHE:$$
    if [ "$fresh" = 1 ]; then
        clone
        [ -x "$checkout/hack/gate.sh" ] || fail "$checkout has no hack/gate.sh"
        fast=
        [ $form = full ] || fast=1
        # The lock goes along; this process stays its holder.
        HOLDFAST_GATE_INSIDE=1 HOLDFAST_GATE_BEGAN=$began FAST=$fast exec "$checkout/hack/gate.sh"
    fi
fi
unset HOLDFAST_GATE_INSIDE HOLDFAST_GATE_BEGAN

# The toolchain that rust-toolchain.toml names, or else an installed one.
toolchain=
if ! rustc --version >/dev/null 2>&1; then
    command -v rustup >/dev/null || fail "there is no rustc: install Rust (https://rustup.rs)"
    RUSTUP_TOOLCHAIN=$(rustup toolchain list | grep -v nightly | head -n 1 | cut -d' ' -f1)
    export RUSTUP_TOOLCHAIN
    rustc --version >/dev/null 2>&1 || fail "rustup provides neither the toolchain of rust-toolchain.toml nor another one"
    toolchain="WARNING: the toolchain of rust-toolchain.toml cannot be had here; $(rustc --version) was used"
fi

# cargo goes by modification times. If the last build was of another directory, those say nothing about our sources.
if [ "$(cat "$CARGO_TARGET_DIR/built-from" 2>/dev/null)" != "$top" ]; then
    find Cargo.toml src tests benches migrations -exec touch {} + 2>/dev/null || true
    echo "$top" >"$CARGO_TARGET_DIR/built-from"
fi

# --- phases --------------------------------------------------------------------------------------------------

rm -rf "$logs"
mkdir -p "$logs"
number=0 passed=0 failed=0 skipped=0 saved=0 child="" follower=""
table=()

# "PASSED FAILED SKIPPED" of the tests in a log: lines of our runner and of cargo test.
count_tests() {
    awk '
        /^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$/ { p += $1; f += $3; s += $5 }
        /^test result: / { p += $4; f += $6; s += $8 }
        END { print p + 0, f + 0, s + 0 }' "$1"
}

# What most likely made a phase fail: its log, exit status, seconds and limit.
cause() {
    local log=$1 status=$2 seconds=$3 limit=$4 lines free
    free=$(free_mib "$HOLDFAST_CACHE")
    if [ "$free" -lt 300 ] || tail -n 60 "$log" | grep -q 'No space left on device'; then
        echo "The disk is full: $free MiB are free where $HOLDFAST_CACHE is, $(free_mib "${TMPDIR:-/tmp}") where ${TMPDIR:-/tmp} is. Make room and run the gate again."
        return
    fi
    if [ "$seconds" -ge "$limit" ]; then
        echo "It had not ended after $limit s, which is its limit."
        lines=$(grep -E '^ *(SLOW|TERMINATING|SIGTERM|TIMEOUT) ' "$log" | awk '{ $1 = $1; print "  " $0 }' | tail -n 5)
        [ -z "$lines" ] || printf 'What ran for long:\n%s\n' "$lines"
        return
    fi
    # An error of a compiler or linter comes with its place.
    lines=$(awk '
        place && /^ *--> / { print "  " $0; place = 0; next }
        { place = 0 }
        /^error(\[[^]]*\])?: / && !/could not compile|aborting due|process didn.t exit|recipe for/ { print "  " $0; place = 1 }
        /^(FAILED|HUNG|left behind) ?/ || /^(make [a-z]+|hack\/[a-z.-]+|gate|test-runner): / || /^Diff in / || /^E: / { print "  " $0 }
        /^test .* \.\.\. FAILED$/ { print "  " $0 }' "$log" | awk '!seen[$0]++' | head -n 8)
    if tail -n 60 "$log" | grep -qE 'Could not resolve|Temporary failure|Network is unreachable|Unable to (connect|fetch)|failed to download|download of .* failed|spurious network error|Connection (timed out|refused) \['; then
        echo "A package or a crate could not be fetched: there is no network, or a registry does not answer."
    fi
    if [ -n "$lines" ]; then
        printf '%s\n' "$lines"
    else
        echo "  Its last line was: $(tail -n 1 "$log")"
    fi
}

# The end of every run, whatever came of it.
finish() {
    local status=$1 row warnings
    printf '\n== phases\n'
    for row in "${table[@]}"; do echo "$row"; done
    warnings=$({ [ -z "$toolchain" ] || echo "$toolchain"; grep -hE '^WARNING: ' "$logs"/*.log 2>/dev/null; } | sort -u)
    [ -z "$warnings" ] || printf '\n%s\n' "$warnings"
    if [ -n "${conclusion:-}" ]; then
        printf '\n== the last lines of %s\n%s\n\n%s\n' "$phase_name" "$(tail -n 40 "$phase_log")" "$conclusion"
    fi
    printf '\n%s passed, %s failed, %s skipped\n' "$passed" "$failed" "$skipped"
    exit "$status"
}

interrupted() {
    trap '' INT TERM HUP
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
    conclusion="The gate was ended by signal $1 in the phase ${phase_name:-of its preparation}."
    failed=$((failed + 1))
    [ -z "$child" ] || wait "$child"
    [ -z "$follower" ] || wait "$follower"
    finish 1
}
phase_log=/dev/null
trap 'interrupted INT' INT
trap 'interrupted TERM' TERM
trap 'interrupted HUP' HUP

# phase NAME SECONDS COMMAND...: runs a command for at most SECONDS and what is saved, shows and keeps what it prints.
phase() {
    phase_name=$1
    local limit=$(($2 + saved)) begin=$SECONDS status seconds counts
    shift 2
    number=$((number + 1))
    phase_log=$logs/$(printf '%02d' $number).log
    printf '\n== %s (at most %s s)\n' "$phase_name" "$limit"
    : >"$phase_log"
    # A file in between: what a program leaves running keeps no pipe open, and no lock.
    timeout --kill-after=30 "$limit" "$@" >"$phase_log" 2>&1 </dev/null 9>&- &
    child=$!
    tail -n +1 -f -s 0.2 --pid=$child "$phase_log" 9>&- &
    follower=$!
    wait $child
    status=$?
    child=
    wait $follower
    follower=
    seconds=$((SECONDS - begin))
    saved=$((limit > seconds ? limit - seconds : 0))
    read -ra counts <<<"$(count_tests "$phase_log")"
    passed=$((passed + counts[0])) failed=$((failed + counts[1])) skipped=$((skipped + counts[2]))
    table+=("$(printf '%5s s of %5s  status %-3s  %s' $seconds "$limit" $status "$phase_name")")
    echo "== $phase_name: exit status $status after $seconds s"
    [ $status != 0 ] || return 0
    [ "${counts[1]}" -gt 0 ] || failed=$((failed + 1))
    conclusion=$(printf 'The gate failed in the phase "%s": exit status %s after %s s.\n%s' "$phase_name" $status $seconds \
        "$(cause "$phase_log" $status $seconds "$limit")")
    finish 1
}

phase "packages" 150 hack/deps.sh
phase "cargo-nextest" 60 hack/nextest.sh
if [ $form = full ]; then
    # Minutes the first time; apart, so that they do not count as the tests'.
    phase "kube-apiserver and etcd" 500 hack/envtest.sh
    phase "other containerds and kubectls" 60 hack/debian.sh all
    phase "package tools" 300 sh -c 'hack/deb.sh tools && hack/deny.sh tools && hack/mdbook.sh'
    phase "clean Debians" 90 hack/debroot.sh minbase systemd
    phase "test machine" 120 hack/machine.sh
fi
phase "make check" 420 make --no-print-directory check
phase "make docs" 30 make --no-print-directory docs
phase "test binaries" 420 cargo build --workspace --all-features --locked --bins --tests
if [ $form = fast ]; then
    phase "make quick" 420 make --no-print-directory quick
fi
# The README's first command, as its readers run it.
phase "make demo" 150 make --no-print-directory demo
if [ $form = full ]; then
    # Schedules that are the same in each gate; `make sim` by hand tries others.
    phase "make sim" 200 make --no-print-directory sim SEEDS=100 FROM=1000000
    # The development build and a short run: fewer boots, and of scenarios that are alike one.
    HOLDFAST_TEST_STRIDE=7 HOLDFAST_MACHINE_BINARY=$CARGO_TARGET_DIR/debug/holdfast phase "make vmtest" 900 \
        make --no-print-directory vmtest \
        NAME="a_cut_right_after a_delayed_shutdown a_node_of_kubeadm no_cut_of_the_power swap_huge_pages"
    # One in three of the points and cases of explorations; `make test` alone tries all.
    HOLDFAST_TEST_STRIDE=3 phase "make test" 1380 make --no-print-directory test
fi

conclusion=
seconds=$(($(date +%s) - began))
printf '\nThe %s gate passed in %s s' $form $seconds
if [ -z "$(git status --porcelain)" ]; then
    echo "$(git rev-parse HEAD) $form $seconds" >>"$HOLDFAST_CACHE/gated"
    echo ": $(git rev-parse HEAD)"
else
    echo "; the tree has uncommitted changes, so no commit is noted in $HOLDFAST_CACHE/gated"
fi
finish 0
