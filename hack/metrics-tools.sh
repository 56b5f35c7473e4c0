#!/bin/sh
# Unpacks promtool (Debian's prometheus) and the OpenMetrics parser of Prometheus' Python client into the cache, without
# installing their packages, and prints the directory: `promtool`, and `openmetrics`, which reads a text from its
# standard input and fails unless it is OpenMetrics. The client needs `decorator`, which a system may not have.
set -eu
. "$(dirname "$0")/lock.sh"

cache=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}
tools=$cache/metrics-tools
if [ ! -e "$tools/decorator.py" ]; then
    mkdir -p "$cache"
    hold "$cache/metrics-tools.lock" "the tools for metrics" 300
    if [ ! -e "$tools/decorator.py" ]; then
        work=$(mktemp -d "$cache/fetch.XXXXXX")
        trap 'rm -rf "$work"' EXIT
        cd "$work"
        download() {
            apt-get -q -o APT::Sandbox::User=root download prometheus python3-prometheus-client python3-decorator >&2
        }
        download || { apt-get -q update >&2 && download; }
        for package in *.deb; do
            dpkg-deb -x "$package" tree
        done
        mkdir new
        mv tree/usr/bin/promtool new/
        mv tree/usr/lib/python3/dist-packages/prometheus_client new/
        mv tree/usr/lib/python3/dist-packages/decorator.py new/
        cat >new/openmetrics <<'END'
#!/usr/bin/env python3
import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from prometheus_client.openmetrics.parser import text_string_to_metric_families
families = list(text_string_to_metric_families(sys.stdin.read()))
print(len(families))
END
        chmod +x new/openmetrics
        rm -rf "$tools"
        mv new "$tools"
    fi
fi
for probe in "promtool --version" openmetrics; do
    # shellcheck disable=SC2086 # a tool and its argument
    echo '# EOF' | "$tools"/$probe >/dev/null || {
        echo "hack/metrics-tools.sh: $tools/$probe does not run on this system" >&2
        exit 1
    }
done
echo "$tools"
