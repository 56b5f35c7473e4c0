# shellcheck shell=sh
# To be sourced. One at a time, and whoever waits says for whom.
#
#   hold FILE WHAT [SECONDS]   takes the lock FILE on descriptor 9, for as long as this script runs. If another process holds it,
#                              prints who, waits at most SECONDS (3600), then fails.
#   release                    gives it back
#
# Programs that may outlive the script are started with `9>&-`: a descriptor that they inherit would hold the lock.

hold() {
    mkdir -p "${1%/*}"
    exec 9>>"$1"
    if ! flock -n 9; then
        echo "${0##*/}: waiting for $2 (at most ${3:-3600} s); it is held by $(holder "$1")" >&2
        if ! flock -w "${3:-3600}" 9; then
            echo "${0##*/}: gave up waiting for $2 after ${3:-3600} s; it is held by $(holder "$1")" >&2
            exit 1
        fi
    fi
    echo "process $$ ($0), since $(date '+%F %T')" >"$1"
}

# Who took the lock FILE, by what it says.
holder() {
    who=$(cat "$1" 2>/dev/null)
    echo "${who:-an unknown process}"
}

release() {
    flock -u 9
    exec 9>&-
}
