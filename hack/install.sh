#!/bin/sh
# Installs holdfast. usage: hack/install.sh BINARY DESTDIR PREFIX
set -eu
cd "$(dirname "$0")/.."

binary=${1:?usage: hack/install.sh BINARY DESTDIR PREFIX} destdir=${2-} prefix=${3:-/usr/local}
root=$destdir$prefix

install -D -m 0755 "$binary" "$root/bin/holdfast"

completion() {
    mkdir -p "$(dirname "$root/$2")"
    "$binary" completions "$1" >"$root/$2"
    chmod 0644 "$root/$2"
}
completion bash share/bash-completion/completions/holdfast
completion zsh share/zsh/site-functions/_holdfast
completion fish share/fish/vendor_completions.d/holdfast.fish

mkdir -p "$root/share/man/man1"
"$binary" man --dir "$root/share/man/man1" >/dev/null

# systemd reads units of packages from /usr/lib, those of an administrator from /usr/local/lib.
install -d -m 0755 "$root/lib/systemd/system"
sed "s|^ExecStart=/usr/local/|ExecStart=$prefix/|" contrib/systemd/holdfast.service \
    >"$root/lib/systemd/system/holdfast.service"
chmod 0644 "$root/lib/systemd/system/holdfast.service"

echo "installed $root/bin/holdfast, completions, manual pages and $root/lib/systemd/system/holdfast.service"
[ -n "$destdir" ] || echo "start it with: systemctl daemon-reload && systemctl enable --now holdfast"
