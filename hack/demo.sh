#!/bin/bash
# What a restart of the agent costs: runs the example pods on a private containerd, kills the agent with
# SIGKILL while one pod is being started and another one crashes, starts it again, and counts.
#
#   hack/demo.sh        run it; KEEP=1 leaves everything running, PROFILE=release measures a release build
#   hack/demo.sh stop   end what an earlier run left
#
# Everything lives in target/demo. What the restart cost is counted outside the agent: from the runtime's
# container IDs and processes, and from the files that containers add a line to when they are started.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "make demo: $*" >&2
    exit 1
}
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n%s\n' "$*"; }

[ "$(uname -s)" = Linux ] || fail "holdfast runs on Linux only; this is $(uname -s)"
[ "$(id -u)" = 0 ] || fail "needs root, since it runs containers: sudo make demo"
case ${1-} in '' | stop) ;; *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac

mkdir -p target
exec 9>target/demo.lock
command -v flock >/dev/null && { flock -n 9 || fail "another demo runs in this checkout"; }

# Sockets have short paths: in a deep checkout the files go to /var/lib, by a name that the next run finds again.
base=$PWD/target/demo
number=$(printf %s "$base" | cksum | cut -d' ' -f1)
[ ${#base} -le 60 ] || base=/var/lib/holdfast-demo-$number
runtime=$base/runtime
state=$base/state
starts=$base/starts
log=$base/agent.log
cgroup=holdfast-demo-$number
node=demo
binary=
agent=

ctr_() { ctr --address "$runtime/containerd.sock" --namespace k8s.io "$@"; }

# --- cleaning up ---------------------------------------------------------------------------------------------

agent_pid() {
    local pid
    pid=$(cut -d' ' -f1 "$state/LOCK" 2>/dev/null) || return 1
    [ -n "$pid" ] && { tr '\0' ' ' <"/proc/$pid/cmdline"; } 2>/dev/null | grep -qF -- "--state-dir $state" &&
        echo "$pid"
}

# Kills what runs in the cgroup $1 and removes it: the containers of a demo that was killed may have lost their shim.
end_cgroup() {
    local pids
    for _ in $(seq 50); do
        pids=$(find "$1" -name cgroup.procs -exec cat {} + 2>/dev/null | sort -u)
        [ -n "$pids" ] || break
        # shellcheck disable=SC2086
        kill -9 $pids 2>/dev/null || true
        sleep 0.1
    done
    find "$1" -depth -type d -exec rmdir {} + 2>/dev/null || true
    [ ! -d "$1" ] || echo "make demo: the cgroup $1 is left, with the processes ${pids//$'\n'/ }" >&2
}

clean_up() {
    trap '' INT TERM
    local pid
    if pid=$(agent_pid); then
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 100); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -9 "$pid" 2>/dev/null || true
    fi
    if [ -d "$runtime" ]; then
        hack/containerd.sh stop "$runtime" || echo "make demo: $runtime is not wholly gone" >&2
    fi
    find /sys/fs/cgroup -maxdepth 2 -type d -name "$cgroup" 2>/dev/null | while read -r dir; do
        end_cgroup "$dir"
    done
    if [ -d "$base" ]; then
        # Volumes: innermost first, and nothing is deleted through a mount.
        cut -d' ' -f5 /proc/self/mountinfo | { grep -aF -- "$base/" || true; } | sort -r | while read -r mount; do
            umount "$mount" 2>/dev/null || umount -l "$mount" || true
        done
        if cut -d' ' -f5 /proc/self/mountinfo | grep -qaF -- "$base/"; then
            echo "make demo: something is still mounted below $base; it is left there" >&2
        else
            rm -rf "$base"
        fi
    fi
}

if [ "${1-}" = stop ]; then
    clean_up
    echo "the demo is gone"
    exit
fi

# --- the agent -----------------------------------------------------------------------------------------------

# GET http://127.0.0.1:$port$1, with what a bare Debian has.
get() {
    { exec 3<>"/dev/tcp/127.0.0.1/$port"; } 2>/dev/null || return 1
    printf 'GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' "$1" >&3
    cat <&3 2>/dev/null
    exec 3<&-
}
ready() { get /readyz | head -1 | grep -q ' 200 '; }

free_port() {
    for port in 10248 $(seq 20248 20300); do
        { exec 3<>"/dev/tcp/127.0.0.1/$port"; } 2>/dev/null || return 0
        exec 3<&-
    done
    fail "no free port for /healthz"
}

start_agent() {
    # In a session of its own: Ctrl-C is for this script, which then ends the agent in order.
    setsid "$binary" run --v 2 \
        --hostname-override "$node" \
        --root-dir "$base/kubelet" \
        --state-dir "$state" \
        --config "$base/config.yaml" \
        --pod-manifest-path "$base/manifests" \
        --container-runtime-endpoint "unix://$runtime/containerd.sock" \
        --container-logs-dir "$base/logs/containers" \
        --cgroup-root "/$cgroup" \
        --healthz-port "$port" >>"$log" 2>&1 9>&- </dev/null &
    agent=$!
}

agent_lives() {
    kill -0 "$agent" 2>/dev/null && return
    tail -5 "$log" >&2
    fail "the agent ended; its log ends as above"
}

# Waits at most $1 seconds for the rest of the line to succeed.
wait_for() {
    local what=$1 end=$((SECONDS + $2))
    shift 2
    until "$@"; do
        agent_lives
        if [ $SECONDS -ge $end ]; then
            dump >&2 || true
            tail -5 "$log" >&2
            fail "gave up waiting until $what"
        fi
        sleep 0.05
    done
}

dump() { "$binary" dump --state-dir "$state" "$@"; }

# --- counting ------------------------------------------------------------------------------------------------

# How often a container was started, by its own file.
started() {
    if [ -f "$starts/$1" ]; then wc -l <"$starts/$1"; else echo 0; fi
}
started_times() { [ "$(started "$1")" -ge "$2" ]; }
all_started() {
    local name
    for name; do started_times "$name" 1 || return 1; done
}
# "ID PID" of the sandboxes that run: one for each pod that is not over.
sandboxes() {
    ctr_ containers ls -q 'labels."io.cri-containerd.kind"==sandbox' | sort >"$base/sandboxes"
    ctr_ tasks ls | awk '$3 == "RUNNING" { print $1, $2 }' | sort | join "$base/sandboxes" -
}
# "ID PID" of what runs, but for the container that fails by itself.
running() {
    ctr_ tasks ls | awk -v but=" $crashing " '
        $3 == "RUNNING" && !index(but, " " $1 " ") { print $1, $2 }' | sort
}
# Whether the runtime starts, undoes or deletes something at this moment.
runtime_works() {
    # runc is run for each of these, with a path of this runtime among its arguments.
    grep -lzF -- "$runtime/" /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3 | while read -r pid; do
        cat "/proc/$pid/comm" 2>/dev/null || true
    done | grep -qx runc || ctr_ tasks ls | awk 'NR > 1 && $3 != "RUNNING" && $3 != "STOPPED" { found = 1 } END { exit !found }'
}
# Waits until the runtime has undone what the agent's end cut off: nothing is under way, and its list stays the same for a second.
wait_until_settled() {
    local last="" now same=0
    for _ in $(seq 600); do
        now=$(running && sandboxes) || fail "the runtime does not list its tasks"
        if [ "$now" = "$last" ] && ! runtime_works; then
            same=$((same + 1))
            [ $same -lt 10 ] || return 0
        else
            same=0 last=$now
        fi
        sleep 0.1
    done
    fail "the runtime did not come to rest within a minute after the agent's end"
}
crash_container() {
    ctr_ containers ls -q "labels.\"io.kubernetes.container.name\"==crash,labels.\"io.cri-containerd.kind\"==container"
}
crash_runs() {
    local id ids
    ids=$(crash_container)
    for id in $ids; do
        ctr_ tasks ls | grep -q "^$id .*RUNNING" && return
    done
    return 1
}
now_ms() { echo $(($(date +%s%N) / 1000000)); }

# --- the demo ------------------------------------------------------------------------------------------------

on_exit() {
    local status=$?
    if [ "${KEEP:-}" = 1 ] && [ -z "${interrupted:-}" ]; then
        return
    fi
    say "cleaning up"
    clean_up
    exit "$status"
}
on_signal() {
    interrupted=1
    exit 130
}

command -v cargo >/dev/null || fail "no cargo in the PATH of root; install Rust, or: sudo env PATH=\"\$PATH\" make demo"
begin=$(now_ms)
hack/deps.sh build runtime
say "building"
if [ "${PROFILE:-dev}" = release ]; then
    cargo build --release --locked
    dir=release
else
    # The dev profile, and with a test target in the selection, so that dependencies get the features that
    # `make test` builds them with: what one has built, the other does not build again.
    cargo build --workspace --all-features --locked --bin holdfast --test layers
    dir=debug
fi
target=$(cargo metadata --format-version 1 --no-deps --offline | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
binary=$target/$dir/holdfast
built=$(now_ms)

trap on_exit EXIT
trap on_signal INT TERM HUP
if [ -d "$base" ]; then
    echo "an earlier demo is still there; ending it"
    (clean_up)
fi

say "starting a private containerd in ${runtime#"$PWD"/}, with images packed from this machine's busybox"
mkdir -p "$base/manifests" "$base/kubelet" "$base/logs/pods" "$base/logs/containers" "$starts"
hack/containerd.sh start "$runtime" 9>&-
for manifest in examples/manifests/*.yaml; do
    sed "s|/run/holdfast-demo/starts|$starts|" "$manifest" >"$base/manifests/${manifest##*/}"
done
cat >"$base/config.yaml" <<EOT
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
podLogsDir: $base/logs/pods
# However full the disks of this machine are.
evictionHard: {memory.available: 100Mi}
# The packet filter and the kernel of this machine are left alone.
makeIPTablesUtilChains: false
protectKernelDefaults: true
EOT
# A pod that comes later: three containers, one after the other.
cat >"$base/late.yaml" <<EOT
apiVersion: v1
kind: Pod
metadata:
  name: late
spec:
  terminationGracePeriodSeconds: 1
  volumes:
  - name: starts
    hostPath: {path: $starts}
  containers:
$(for name in first second third; do
    cat <<EOC
  - name: $name
    image: holdfast.local/busybox:1
    imagePullPolicy: IfNotPresent
    command: [sh, -c, 'date -u +%FT%TZ >> /starts/late.$name; trap "exit 0" TERM; sleep 3600 & wait']
    volumeMounts:
    - {name: starts, mountPath: /starts}
EOC
done)
EOT
late=(late.first late.second late.third)
steady=(counter.count web.writer web.httpd)

say "holdfast check: nothing of this would be rejected"
"$binary" check --node-name "$node" --config "$base/config.yaml" "$base/manifests" "$base/late.yaml" ||
    fail "holdfast check rejects what the demo runs"

say "starting the agent on examples/manifests"
free_port
start_agent
wait_for "the agent is ready" 60 ready
wait_for "the pods run" 60 all_started "${steady[@]}" once.once crash.crash
wait_for "crash has crashed and was started again" 60 started_times crash.crash 2

say "holdfast dump: what the agent remembers"
dump
say "adding a pod of three containers, and kill -9 while it is being started"
mv "$base/late.yaml" "$base/manifests/late.yaml"
wait_for "its first container runs" 30 started_times late.first 1
kill -9 "$agent"
wait "$agent" 2>/dev/null || true
killed=$(now_ms)
crashing=$(crash_container | tr '\n' ' ')
wait_until_settled
running >"$base/running.before"
sandboxes >"$base/sandboxes.before"
for name in "${steady[@]}" once.once "${late[@]}" crash.crash; do echo "$name $(started "$name")"; done >"$base/starts.before"
echo "killed process $agent; $(grep -c '^late.* 1$' "$base/starts.before" || true) of the 3 containers of \"late\" were started"

say "nobody is there: the containers run on, and \"crash\" crashes unobserved"
for _ in $(seq 100); do
    crash_runs || break
    sleep 0.1
done
crash_runs || echo "crash exited; a dump of the store of the dead agent still works:"
dump overview

say "starting the agent again"
began=$(now_ms)
start_agent
while ! ready; do
    agent_lives
    [ $(($(now_ms) - began)) -lt 60000 ] || fail "the agent is not ready after 60 s"
    sleep 0.005
done
resumed=$(now_ms)
wait_for "the new pod runs" 60 all_started "${late[@]}"
# Time for mistakes to show.
sleep 3

running >"$base/running.after"
sandboxes >"$base/sandboxes.after"
kept=$(comm -12 "$base/running.before" "$base/running.after" | wc -l)
ran=$(wc -l <"$base/running.before")
pods=$(wc -l <"$base/sandboxes.before")
pods_kept=$(comm -12 "$base/sandboxes.before" "$base/sandboxes.after" | wc -l)
restarted=$((ran - kept))
cut_off=
while read -r name before; do
    case $name in crash.*) continue ;; esac
    after=$(started "$name")
    # What had not been started before is to be started once.
    wanted=$((before > 0 ? before : 1))
    # The runtime undoes a start whose caller dies in it, also when the process has run for a moment: only a second one helps.
    case $name in
    late.*)
        if [ -z "$cut_off" ] && [ "$after" -eq 2 ] && dump --quiet --history "default/late-$node" |
            grep -q "container ended.* ${name#late.} attempt 0: exit code 128 (StartError)"; then
            cut_off=${name#late.}
            wanted=2
        fi
        ;;
    esac
    if [ "$after" -ne "$wanted" ]; then
        echo "$name was started $after times, not $wanted" >&2
        restarted=$((restarted + (after > wanted ? after - wanted : 1)))
    fi
done <"$base/starts.before"
own=$(get /metrics | awk '/^holdfast_restore_duration_seconds/ { printf "%.0f", $2 * 1000 }')

dump overview
say "why, in the agent's words: holdfast dump --history default/late-$node"
dump --quiet --history "default/late-$node" | cut -c1-"${COLUMNS:-160}"

say "what the restart cost"
printf '  %-28s %s\n' \
    "pods resumed" "$pods_kept of $pods (same sandboxes in the runtime; the one that was over stays so)" \
    "containers that ran on" "$kept of $ran (same IDs, same processes)" \
    "containers restarted" "$restarted (by IDs, and by the line each container writes when it is started)" \
    "start that was cut off" "${cut_off:-none} (the runtime undoes a start whose caller dies; it was made again)" \
    "milliseconds to resumed" "$((resumed - began)) from process start to /readyz ($dir build; by the agent's own clock ${own:-?})" \
    "without an agent" "$((resumed - killed)) ms"
printf '  %-28s' "starts by the files"
for name in "${steady[@]}" once.once "${late[@]}" crash.crash; do printf ' %s=%s' "$name" "$(started "$name")"; done
echo
echo
echo "(crash is meant to fail and be started again, so it is left out of the count.)"
printf 'took %s s, building %s s\n' "$((($(now_ms) - built) / 1000))" "$(((built - begin) / 1000))"

if [ "${KEEP:-}" = 1 ]; then
    cat <<EOT

Everything goes on running. To look around:

  export HOLDFAST_STATE_DIR=$state PATH=\$PATH:${binary%/*}
  holdfast dump                        # the pods
  holdfast dump default/web-$node       # one of them, everything about it
  holdfast dump journal --watch        # what happens now
  kill -9 $agent                       # the agent, and nothing happens to the pods

  export CONTAINERD_ADDRESS=$runtime/containerd.sock CONTAINERD_NAMESPACE=k8s.io
  ctr tasks ls                         # what the runtime says (crictl: -r unix://\$CONTAINERD_ADDRESS)

  manifests  $base/manifests (add, change, delete)
  logs       $base/logs/containers, and the agent's: $log
  metrics    http://127.0.0.1:$port/metrics

To end it: make demo-stop
EOT
fi
[ "$restarted" = 0 ] && [ "$pods_kept" = "$pods" ] && [ "$pods" -gt 0 ] || fail "the restart was not free"
