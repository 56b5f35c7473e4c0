#!/bin/sh
# Installs holdfast, or removes what was installed. Configuration, state and pods are nobody's business here.
# usage: hack/install.sh BINARY DESTDIR PREFIX
#        hack/install.sh uninstall DESTDIR PREFIX
set -eu
cd "$(dirname "$0")/.."

binary=${1:?usage: hack/install.sh BINARY|uninstall DESTDIR PREFIX} destdir=${2-} prefix=${3:-/usr/local}
root=$destdir$prefix
doc=$root/share/doc/holdfast
# systemd reads units of packages from /usr/lib, those of an administrator from /usr/local/lib.
unit=$root/lib/systemd/system/holdfast.service

if [ "$binary" = uninstall ]; then
    rm -f "$root/bin/holdfast" "$unit" "$root/share/bash-completion/completions/holdfast" \
        "$root/share/zsh/site-functions/_holdfast" "$root/share/fish/vendor_completions.d/holdfast.fish" \
        "$root/share/man/man1/holdfast.1" "$root/share/man/man1/holdfast-"*.1
    rm -rf "$doc"
    echo "removed holdfast from $root; /etc/holdfast, /etc/default/holdfast and /var/lib/holdfast were not looked at"
    [ -n "$destdir" ] || echo "if it runs: systemctl disable --now holdfast (pods run on), then systemctl daemon-reload"
    exit 0
fi

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
chmod 0644 "$root/share/man/man1/holdfast"*.1

install -d -m 0755 "$(dirname "$unit")"
sed "s|^ExecStart=/usr/local/|ExecStart=$prefix/|" contrib/systemd/holdfast.service >"$unit"
chmod 0644 "$unit"

# The documents, where their links to each other hold.
for file in README.md ARCHITECTURE.md docs/*.md docs/pictures/*.svg; do
    # The chapters of the site.
    [ "$file" != docs/SUMMARY.md ] || continue
    install -D -m 0644 "$file" "$doc/$file"
done
for file in examples/config/* examples/manifests/*; do
    install -D -m 0644 "$file" "$doc/$file"
done
for file in contrib/*/*; do
    case $file in contrib/debian/* | contrib/systemd/holdfast.service) continue ;; esac
    install -D -m 0644 "$file" "$doc/examples/${file#contrib/}"
done
sed -i "s|^ExecStart=/usr/bin/|ExecStart=$prefix/bin/|" "$doc/examples/systemd/kubeadm.conf"
sed -i "s|^ExecStop=/usr/bin/|ExecStop=$prefix/bin/|" "$doc/examples/systemd/holdfast-drain.service"
install -D -m 0644 contrib/debian/holdfast.logrotate "$doc/examples/logrotate"

echo "installed $root/bin/holdfast, completions, manual pages, documents and $unit"
[ -n "$destdir" ] || echo "start it with: mkdir -p /etc/holdfast; cp $doc/examples/config/kubelet.yaml /etc/holdfast/config.yaml;" \
    "systemctl daemon-reload && systemctl enable --now holdfast"
